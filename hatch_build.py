"""Compiles the text parser of the readers, where a C compiler is at hand; the package works without it, only slower."""

import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NumbersHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        folder = Path(self.root) / "src" / "m2lgdg" / "data" / "readers"
        compiler = next(filter(shutil.which, [(sysconfig.get_config_var("CC") or "cc").split()[0], "cc", "gcc", "clang"]), None)
        command = [compiler or "cc", "-O3", "-shared", "-fPIC", "-o", str(folder / "_numbers.so"), str(folder / "_numbers.c")]
        try:
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError):
            (folder / "_numbers.so").unlink(missing_ok=True)
            self.app.display_warning("no working C compiler: numpy will read text files, about five times slower")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
