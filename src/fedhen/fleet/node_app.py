"""The app on a node: only code whose digest the node's operator has accepted is unpacked and imported."""

from __future__ import annotations

import importlib
import shutil
import sys
import tomllib
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

from flwr.clientapp import ClientApp

from fedhen.errors import FleetError, one_line
from fedhen.fileio.atomic import replace_file
from fedhen.fleet.app_digest import digest_bundle, read_bundle, unpack_bundle
from fedhen.fleet.node_file import read_node_file

APPS, OFFERED = "apps", "offered"
PROJECT = "pyproject.toml"


@dataclass
class AppLoader:
    """Loads the apps of runs. One is loaded at a time, and stays loaded until another one is needed."""

    file: Path
    """The node's file. It is read for every run, so that an app can be accepted while the node runs."""
    state: Path
    digest: str = ""
    """The digest of the loaded app."""
    app: ClientApp | None = None

    def load(self, bundle: bytes) -> ClientApp:
        """Returns the app in a bundle. Raises `FleetError` if it is not accepted or cannot be imported."""
        digest = digest_bundle(bundle)
        if digest not in read_node_file(self.file).app:
            raise FleetError(
                f"app {digest} is not accepted by this node: read its code in {self.keep(bundle)}, then add the digest "
                f"to `app` in {self.file}"
            )
        if self.app is None or digest != self.digest:
            self.app = self.import_app(bundle, digest)
            self.digest = digest
        return self.app

    def keep(self, bundle: bytes) -> Path:
        """Stores an app that is not accepted, packed as it came, in place of the one before."""
        path = self.state / f"{OFFERED}.zip"
        replace_file(path, bundle)
        return path

    def import_app(self, bundle: bytes, digest: str) -> ClientApp:
        """Unpacks an app and imports it, after it has removed the one before from this process."""
        self.app = None
        folder = (self.state / APPS / digest).absolute()
        forget_modules(folder.parent)
        shutil.rmtree(folder.parent, ignore_errors=True)
        unpack_bundle(bundle, folder)
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        try:
            parts = tomllib.loads(read_bundle(bundle)[PROJECT].decode())["tool"]["flwr"]["app"]["components"]
            module, _, name = str(parts["clientapp"]).partition(":")
            app = getattr(importlib.import_module(module), name)
        except Exception as error:
            raise FleetError(f"the app cannot be imported: {type(error).__name__}: {one_line(str(error))}") from error
        if not isinstance(app, ClientApp):
            raise FleetError(f"the app's {parts['clientapp']} is not a ClientApp")
        return app


def forget_modules(folder: Path) -> None:
    """Removes what was imported from a folder."""
    sys.path[:] = [path for path in sys.path if not Path(path).is_relative_to(folder)]
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__dict__", {}).get("__spec__")
        places = [spec.origin, *(spec.submodule_search_locations or ())] if isinstance(spec, ModuleSpec) else []
        if any(place and Path(place).is_relative_to(folder) for place in places):
            del sys.modules[name]
