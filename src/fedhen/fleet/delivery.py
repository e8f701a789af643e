"""Finished models go home: the server sends each node the files of its tier, and the node checks and keeps them."""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedhen.errors import FleetError, one_line
from fedhen.fileio import untrusted
from fedhen.fileio.atomic import replace_file, write_json
from fedhen.fleet import wire_format
from fedhen.fleet.exchange import Messages
from fedhen.fleet.membership import IDENTIFY_TIMEOUT_SECONDS, Membership
from fedhen.fleet.wire_format import Malformed

DELIVERY, DELIVERED = "delivery", "delivered.json"
"""In a run folder: the files to deliver, a folder for each tier, and who has got them."""
DELIVERIES = "deliveries.json"
"""In a fleet's folder: node -> what it has."""
ACTION = "deliver"
MODELS, CURRENT = "models", "current"
"""In a node's state folder: the last models, and a link to the newest of them."""
MODELS_KEPT = 2
SUFFIXES = (".safetensors", ".onnx", ".data", ".json", ".md")
"""Models and what describes them. A node accepts nothing that could be run."""
LARGEST = 2**31
DELIVERY_SECONDS, LOOK_SECONDS = 300.0, 0.5


@dataclass(frozen=True)
class Delivered:
    """What has become of a delivery to one node."""

    node: str
    name: str
    tier: str
    digest: str = ""
    """Of the files that the node has confirmed; empty if it has not."""
    error: str = ""


def digest_files(files: Mapping[str, bytes]) -> str:
    """Returns the SHA-256 digest of the names and contents of files."""
    lines = [f"{hashlib.sha256(content).hexdigest()} {name}\n" for name, content in sorted(files.items())]
    return wire_format.digest_of("".join(lines))


def read_files(folder: Path) -> dict[str, bytes]:
    """Returns name -> content of a folder's files that nodes accept."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES}


def pack_files(files: Mapping[str, bytes]) -> RecordDict:
    names = sorted(files)
    about = ConfigRecord({"format": wire_format.FORMAT, "names": names, "digest": digest_files(files)})
    arrays = ArrayRecord(
        {str(place): Array("uint8", (len(files[n]),), "file", files[n]) for place, n in enumerate(names)}
    )
    return RecordDict({ACTION: about, "files": arrays})


def unpack_files(content: RecordDict) -> tuple[dict[str, bytes], str]:
    """Returns the files of a delivery and their digest. Raises `Malformed` if they do not match it."""
    about, arrays = content.get(ACTION), content.get("files")
    if not isinstance(about, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise Malformed("the delivery has no files")
    names = about.get("names")
    if not isinstance(names, list) or [*arrays] != [str(place) for place in range(len(names))]:
        raise Malformed("the delivery has other files than it names")
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", str(name)) or Path(str(name)).suffix not in SUFFIXES:
            raise Malformed(f"the delivery has a file that is no model: {one_line(str(name))[:100]!r}")
    files = {str(name): array.data for name, array in zip(names, arrays.values(), strict=True)}
    if sum(map(len, files.values())) > LARGEST:
        raise Malformed("the delivery is too large")
    if (digest := digest_files(files)) != about.get("digest"):
        raise Malformed("the files do not have the SHA-256 that the server names")
    return files, digest


def keep_files(state: Path, files: Mapping[str, bytes], digest: str) -> Path:
    """Stores a delivery, makes it the current one, and removes all but the last two. Returns its folder."""
    folder = state / MODELS / digest[:16]
    new = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for name, content in files.items():
        replace_file(new / name, content)
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
    link = folder.with_name(f".{CURRENT}.new")
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.replace(folder.with_name(CURRENT))
    others = [path for path in folder.parent.iterdir() if path.is_dir() and not path.is_symlink() and path != folder]
    for path in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)[MODELS_KEPT - 1 :]:
        shutil.rmtree(path, ignore_errors=True)
    return folder


def accept(content: RecordDict, state: Path) -> RecordDict:
    """The node's part: checks and stores a delivery. Returns the digest of what it has now, or why it has not."""
    try:
        files, digest = unpack_files(content)
        keep_files(state, files, digest)
    except (Malformed, OSError) as error:
        text = f"cannot be stored: {error.strerror}" if isinstance(error, OSError) else str(error)
        return wire_format.pack_failure(one_line(text))
    return RecordDict({ACTION: ConfigRecord({"format": wire_format.FORMAT, "digest": digest})})


def deliver(grid: Grid, config_text: str, run: Path, flower_run: int, poll: float = LOOK_SECONDS) -> list[Delivered]:
    """The server's part: sends the files in the run's folder to all connected nodes, and writes who has them."""
    tiers = {path.name: read_files(path) for path in sorted((run / DELIVERY).iterdir()) if path.is_dir()}
    packed = {tier: pack_files(files) for tier, files in tiers.items()}
    membership = Membership(grid, config_text)
    wait_for_identities(membership, poll)
    messages: Messages[int] = Messages(grid)
    found, letters = [], []
    for node in sorted(membership.online):
        state = membership.describe(node)
        if not state.tier or state.tier not in packed:
            why = state.problem or f"there is no model for tier {state.tier!r}"
            found.append(Delivered(str(node), state.name, state.tier, error=why))
            continue
        kind = f"{MessageType.QUERY}.{ACTION}"
        letters.append((node, Message(packed[state.tier], node, kind, ttl=DELIVERY_SECONDS)))
    refused = [(node, "the SuperLink does not accept its message") for node in messages.send(letters)]
    for node, content in [*refused, *collect_all(messages, poll)]:
        state = membership.describe(node)
        digest, error = read_receipt(content, digest_files(tiers[state.tier]))
        found.append(Delivered(str(node), state.name, state.tier, digest, error))
    values = {"flower": str(flower_run), "nodes": [asdict(each) for each in found]}
    write_json(run / DELIVERED, values)
    return found


def wait_for_identities(membership: Membership, poll: float) -> None:
    """Waits until every connected node has said what it is, or why it cannot."""
    end = time.monotonic() + IDENTIFY_TIMEOUT_SECONDS
    membership.update()
    while membership.online - membership.identities.keys() - membership.problems.keys() and time.monotonic() < end:
        time.sleep(poll)
        membership.update()


def collect_all(messages: Messages[int], poll: float) -> Iterator[tuple[int, RecordDict | str]]:
    end = time.monotonic() + DELIVERY_SECONDS
    while messages.waiting and time.monotonic() < end:
        yield from messages.collect()
        if messages.waiting:
            time.sleep(poll)
    yield from ((node, "it has not answered") for node in messages.forget())


def read_receipt(content: RecordDict | str, expected: str) -> tuple[str, str]:
    """Returns the digest that a node has confirmed and "", or "" and what went wrong."""
    if isinstance(content, str):
        return "", content
    try:
        wire_format.check_failure(content)
    except Malformed as error:
        return "", str(error)
    receipt = content.get(ACTION)
    if not isinstance(receipt, ConfigRecord) or receipt.get("digest") != expected:
        return "", "it confirms other files than it was sent"
    return expected, ""


def read_delivered(run: Path, flower_run: str) -> list[Delivered] | None:
    """Reads who has got the models. Returns None until the server's app has written it."""
    try:
        values = untrusted.read_json(run / DELIVERED)
        if values is None or values["flower"] != flower_run:
            return None
        return [
            Delivered(**{key: untrusted.check_text(text) for key, text in each.items()}) for each in values["nodes"]
        ]
    except (OSError, *untrusted.PARSE_ERRORS):
        return None


def note_deliveries(fleet: Path, run: Path, delivered: list[Delivered]) -> None:
    """Notes in the fleet's folder which node has which model, for `status`."""
    known = read_deliveries(fleet)
    known |= {each.node: f"{run.name} {each.digest[:8]}" for each in delivered if each.digest}
    write_json(fleet / DELIVERIES, {"nodes": known})


def read_deliveries(fleet: Path) -> dict[str, str]:
    """Returns node -> the model that it has."""
    with suppress(OSError, *untrusted.PARSE_ERRORS):
        values = untrusted.read_json(fleet / DELIVERIES) or {"nodes": {}}
        return {str(node): untrusted.check_text(model) for node, model in values["nodes"].items()}
    return {}


def prepare_safetensors(run: Path, delivery: Path, tiers: list[str]) -> None:
    """Copies the models of a finished run into a folder for each tier."""
    for tier in tiers:
        path = run / "models" / f"server-{tier}.safetensors"
        if not path.is_file():
            raise FleetError(f"{path} is missing: only the models of a finished run are delivered")
        (delivery / tier).mkdir(parents=True)
        shutil.copy(path, delivery / tier)
