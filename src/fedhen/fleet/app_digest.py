"""The digest of a fleet's app: what a node's operator accepts before the node runs any of its code."""

from __future__ import annotations

import hashlib
import io
import re
import warnings
import zipfile
from pathlib import Path

from fedhen.errors import FleetError, one_line

MANIFEST = ".info/"
"""The folder in Flower's bundle that describes the other files."""
LARGEST_APP = 64 * 2**20
DIGEST_PATTERN = r"[0-9a-f]{64}"


def build_bundle(folder: Path) -> bytes:
    """Builds the bundle that Flower ships of an app's folder."""
    from flwr.cli.build import build_fab_from_disk

    try:
        with warnings.catch_warnings():
            # Flower uses a deprecated function of one of its libraries.
            warnings.simplefilter("ignore")
            return build_fab_from_disk(folder)
    except (ValueError, OSError) as error:
        raise FleetError(f"{folder} is not an app that Flower can ship: {one_line(str(error))}") from None


def digest_bundle(bundle: bytes) -> str:
    """Returns the SHA-256 digest of an app: of the names and contents of its files, not of how they are packed."""
    lines = [f"{hashlib.sha256(content).hexdigest()} {name}\n" for name, content in sorted(read_bundle(bundle).items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_bundle(bundle: bytes) -> dict[str, bytes]:
    """Returns name -> content of an app's files. Raises `FleetError` if the bundle is not what Flower builds."""
    try:
        with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > LARGEST_APP:
                raise FleetError("the app is too large")
            names = [entry.filename for entry in archive.infolist() if not entry.filename.startswith(MANIFEST)]
            files = {name: archive.read(name) for name in names if is_safe(name)}
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError):
        raise FleetError("the app cannot be unpacked") from None
    if len(files) != len(names):
        raise FleetError("the app has a file with an unsafe or repeated name")
    return files


def is_safe(name: str) -> bool:
    parts = Path(name).parts
    return bool(re.fullmatch(r"[A-Za-z0-9_./ -]+", name)) and not name.startswith("/") and ".." not in parts


def unpack_bundle(bundle: bytes, folder: Path) -> None:
    """Writes the files of an app."""
    for name, content in read_bundle(bundle).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
