"""Checks that the packages of an export are there and fit together."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from fedhen.errors import FedhenError

ONNX = {"onnx": (1, 21), "onnxscript": (0, 7), "onnxruntime": (1, 24)}
"""Package -> the first version that works."""
EXECUTORCH = {"1.3": "2.12", "1.4": "2.13", "1.5": "2.14"}
"""ExecuTorch -> the one torch that it was built for."""
ADVICE = {"2.12": "executorch==1.3.1", "2.13": "executorch==1.4.1", "2.14": "executorch==1.5.1"}


def require_onnx(what: str = "export", packages: tuple[str, ...] = tuple(ONNX)) -> None:
    """Raises a FedhenError if packages for ONNX are missing or too old."""
    for name in packages:
        found = find_version(name)
        if not found:
            raise FedhenError(f"{what} needs ONNX, and {name} is not installed: pip install 'fedhen[onnx]'")
        if _numbers(found) < ONNX[name]:
            least = ".".join(map(str, ONNX[name]))
            raise FedhenError(f"{what} needs {name} {least} or newer, this is {found}: pip install 'fedhen[onnx]'")


def require_executorch() -> None:
    """Raises a FedhenError if ExecuTorch is missing or was built for another torch."""
    found, torch = find_version("executorch"), find_version("torch")
    if not found:
        raise FedhenError("export needs ExecuTorch, which is not installed: pip install 'fedhen[executorch]'")
    check_pair(found, torch)


def check_pair(executorch: str, torch: str) -> None:
    """Raises a FedhenError if an ExecuTorch and a torch do not fit."""
    built_for, here = EXECUTORCH.get(_minor(executorch)), _minor(torch)
    if built_for != here:
        advice = f"pip install '{ADVICE[here]}'" if here in ADVICE else f"install torch {built_for or '2.13'}"
        what = f"for torch {built_for}" if built_for else "not known to fit any torch"
        raise FedhenError(f"executorch {executorch} is {what}, this is {torch.partition('+')[0]}: {advice}")


def find_version(name: str) -> str:
    """Returns the version of a package, or "" if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _minor(found: str) -> str:
    return ".".join(found.split(".")[:2])


def _numbers(found: str) -> tuple[int, ...]:
    return tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
