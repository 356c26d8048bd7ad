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
        folder = Path(self.root) / "src" / "m2lgdg" / "readers"
        compiler = next(filter(shutil.which, [(sysconfig.get_config_var("CC") or "cc").split()[0], "cc", "gcc", "clang"]), None)
        if compiler is None:
            self.app.display_warning("no C compiler: text files will be read by numpy, about five times slower")
            return
        command = [compiler, "-O3", "-shared", "-fPIC", "-o", str(folder / "_numbers.so"), str(folder / "_numbers.c")]
        subprocess.run(command, check=True)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
