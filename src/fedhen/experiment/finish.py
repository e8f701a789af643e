"""Ends a run where it is: writes its models and its summary from its newest checkpoint. It can still be resumed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from fedhen.config import toml
from fedhen.errors import CheckpointError
from fedhen.experiment import checkpoint_files
from fedhen.experiment.checkpoint_files import Checkpoint, DamagedCheckpoint
from fedhen.experiment.saved_models import CheckpointModels, open_checkpoint_models, open_newest, write_models
from fedhen.experiment.stopping import FINISHED_BY_HAND, describe_rule, read_rule
from fedhen.experiment.summary import Outcome, make_summary
from fedhen.fileio.atomic import write_json
from fedhen.fileio.locks import lock_folder
from fedhen.fileio.untrusted import PARSE_ERRORS, check_number
from fedhen.params import count_elements
from fedhen.profiles.workload import Workload
from fedhen.runs.folders import find_config
from fedhen.runs.layout import FLEET, ROUNDS, SUMMARY
from fedhen.runs.private import read_spent
from fedhen.runs.reader import Run, read_run
from fedhen.runs.writer import cut_records, explain_write_errors


def finish_run(folder: Path) -> bool:
    """Ends an unfinished run after the round of its newest checkpoint. Returns whether it was unfinished.

    Later records are removed, as `resume` does. Raises FedhenError if the run is being played.
    """
    config_file = find_config(folder)
    with lock_folder(folder), explain_write_errors(folder):
        run = read_run(folder)
        if run.summary is not None:
            return False
        models = open_newest(folder, partial(open_recorded, run, toml.read_toml(config_file)))
        tiers, best = models.config.tiers, models.best_models()
        last = {of: {tier: models.read(tier, of).weights for tier in tiers} for of in run.owners}
        outcome = Outcome(
            {tier: count_elements(weights) for tier, weights in last["server"].items()},
            Workload(),
            {of: {tier: model.round for tier, model in found.items()} for of, found in best.items()},
            read_seconds(models),
            describe_end(models),
            (folder / FLEET).is_file(),
            read_spent(folder),
        )
        records = [record.to_dict() for record in run.rounds[: models.round]]
        cut_records(folder, models.round)
        write_models(folder, last, best, models.round, models.start.manifest["models"])
        write_json(folder / SUMMARY, make_summary(models.config, run.metrics, records, outcome))
        checkpoint_files.discard_later(models.saved.place, after=models.round)
        checkpoint_files.keep_newest(models.saved.place, 1)
    return True


def open_recorded(run: Run, config: Any, saved: Checkpoint) -> CheckpointModels:
    """Opens the models of a checkpoint whose rounds are all recorded."""
    if len(run.rounds) < saved.round:
        raise DamagedCheckpoint(f"{ROUNDS} holds only {len(run.rounds)} complete rounds")
    return open_checkpoint_models(run.folder, config, saved)


def read_seconds(models: CheckpointModels) -> float:
    try:
        return check_number(models.saved.manifest["seconds"])
    except PARSE_ERRORS:
        raise CheckpointError(f"{models.folder}: the checkpoint of round {models.round} is malformed") from None


def describe_end(models: CheckpointModels) -> dict[str, Any]:
    """Returns why the run ends: it may have been killed after its last round, or after the one in which it stopped."""
    if models.round >= models.config.rounds:
        return {}
    manifest, rule = models.saved.manifest, describe_rule(models.config)
    if (reason := manifest.get("standing", {}).get("reason")) and read_rule(manifest["config"]) == rule:
        return {"reason": str(reason), "rule": rule}
    return {"reason": FINISHED_BY_HAND}
