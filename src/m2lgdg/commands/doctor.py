"""`m2lgdg doctor`: versions, devices, threads, and what is missing for which command."""

from __future__ import annotations

from typing import Any

import typer

from m2lgdg.commands import options, terminal


@terminal.command()
def doctor(as_json: options.Json = False) -> None:
    """Show versions, devices and threads, and what is missing for which command.

    Exit code 0: the linear methods can be used; 1: a library that they need is missing or too old.
    """
    from m2lgdg.deploy.doctor import examine

    with terminal.progress("examining the installation"):
        result = examine()
    if as_json:
        terminal.print_json(result)
    else:
        _show(result)
    raise typer.Exit(1 if result["problems"] else 0)


def _show(result: dict[str, Any]) -> None:
    terminal.say(f"m2lgdg {result['m2lgdg']}, Python {result['python']}, {result['system']}")
    terminal.say("Libraries: " + ", ".join(f"{name} {version}" for name, version in result["libraries"].items() if version))
    pools = ", ".join(f"{name} {count}" for name, count in result["threads"].items())
    variables = ", ".join(f"{name}={value}" for name, value in result["variables"].items() if value is not None)
    terminal.say(f"Cores: {result['cores']}; threads by library: {pools or 'none'}{f' ({variables})' if variables else ''}")
    terminal.say("Devices: " + ", ".join(_device(device) for device in result["devices"]))
    if not result["file_locks"]:
        terminal.say("This system has no file locks: do not start two runs of one study folder at a time.")
    for name, extra in result["extras"].items():
        state = f"missing {', '.join(extra['missing'])}; install with: {extra['install']}" if extra["missing"] else "ready"
        terminal.say(f"Extra {name} ({extra['for']}): {state}")
    terminal.warn(*result["problems"])
    terminal.say("Linear methods: not usable" if result["problems"] else "Linear methods and all other commands: ready")


def _device(device: dict[str, Any]) -> str:
    memory = f", {device['memory_gib']} GiB" if "memory_gib" in device else ""
    return f"{device['name']} ({device['model']}{memory})"
