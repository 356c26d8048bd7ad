"""Compiles the text parser of the readers for an editable install, where a C compiler is at hand.

A wheel is the same for every system: it has no compiled file, and numpy reads text files, with the same result but about five
times slower. With M2LGDG_COMPILE=1 the parser is compiled into the wheel too, which then fits this system only.
"""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PARSER = Path("src") / "m2lgdg" / "data" / "readers" / "_numbers.so"


class NumbersHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = version == "editable" or os.environ.get("M2LGDG_COMPILE") == "1"
        if self.target_name != "wheel" or not wanted:
            return
        to = Path(self.root) / PARSER
        compiler = next(filter(shutil.which, [(sysconfig.get_config_var("CC") or "cc").split()[0], "cc", "gcc", "clang"]), None)
        command = [compiler or "cc", "-O3", "-shared", "-fPIC", "-o", str(to), str(to.with_suffix(".c"))]
        try:
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError):
            to.unlink(missing_ok=True)
            self.app.display_warning("no working C compiler: numpy will read text files, about five times slower")
            return
        build_data["artifacts"].append(PARSER.as_posix())
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
