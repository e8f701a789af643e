"""Reports from run folders: rounds and bytes to target, gains, curves and one HTML page. Needs no torch."""

from fedhen.reports.comparison import HERO, Comparison, compare
from fedhen.reports.paper.report import write_paper
from fedhen.reports.rendering import Group, Table
from fedhen.reports.report import Report, report_folders, write_report
from fedhen.reports.targets import AUTO, auto_targets, rounds_to_target

__all__ = [
    "AUTO",
    "HERO",
    "Comparison",
    "Group",
    "Report",
    "Table",
    "auto_targets",
    "compare",
    "report_folders",
    "rounds_to_target",
    "write_paper",
    "write_report",
]
