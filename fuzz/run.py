"""Fuzz the parsers: atheris where it is installed, else a loop of mutations of our own; what breaks is kept under fuzz/found.

Usage: python fuzz/run.py [NAMES ...] [--seconds 60] [--seed 0] [--plain]; a JSON line a target, exit code 1 where one broke.
"""

import argparse
import contextlib
import hashlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
ODD = [
    b"0",
    b"-1",
    b"1e400",
    b"NaN",
    b"null",
    b"[]",
    b"{}",
    b'""',
    b"true",
    b"9" * 30,
    b"2147483648",
    b"\xff",
    b"\0",
    b"\n",
    b"../x",
]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="our own loop also where atheris is installed")
    parser.add_argument("--atheris", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.atheris:
        guided(options.atheris, options.seconds, options.seed)
    from targets import TARGETS

    unknown = set(options.names) - set(TARGETS)
    if unknown:
        sys.exit(f"no target {unknown.pop()}; there are {', '.join(TARGETS)}")
    with contextlib.suppress(ImportError):
        options.plain = options.plain or not __import__("atheris")
    if "atheris" not in sys.modules:
        options.plain = True
    broken = 0
    for name in options.names or TARGETS:
        reported = mutations(name, options.seconds, options.seed) if options.plain else by_atheris(name, options)
        print(json.dumps({"target": name, **reported}), flush=True)
        broken += reported["broken"]
    sys.exit(1 if broken else 0)


def keep(name, data):
    """Where an input that broke something lies."""
    folder = HERE / "found" / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(data).hexdigest()[:16]
    path.write_bytes(data)
    return path


def mutations(name, seconds, seed):
    """Random damage to the seeds and to inputs made of them; stops at the first ten defects."""
    from targets import SEEDS, TARGETS

    dice, seeds, end = random.Random(seed), SEEDS[name](), time.monotonic() + seconds
    runs = broken = 0
    while time.monotonic() < end and broken < 10:
        data = mutated(dice, dice.choice(seeds), seeds)
        runs += 1
        try:
            TARGETS[name](data)
        except Exception as error:
            broken += 1
            print(f"{name}: {type(error).__name__}: {str(error)[:300]} ({keep(name, data)})", file=sys.stderr)
    return {"engine": "mutations", "runs": runs, "broken": broken}


def mutated(dice, data, seeds):
    """One to four changes: bits, bytes, pieces cut, repeated or taken from another seed, numbers and words replaced."""
    for _ in range(dice.choice((1, 1, 2, 4))):
        at, size = dice.randrange(len(data) + 1), dice.choice((1, 1, 4, 16, 64))
        kind = dice.randrange(7)
        if kind == 0 and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << dice.randrange(8))]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + dice.randbytes(size) + data[at:]
        elif kind == 2:
            data = data[:at] + data[at + size :]
        elif kind == 3:
            data = data[:at] + data[at : at + size] * dice.choice((2, 3, 50)) + data[at + size :]
        elif kind == 4:
            other = dice.choice(seeds)
            data = data[:at] + other[dice.randrange(len(other) + 1) :]
        elif kind == 5:
            data = data[:at] + dice.choice(ODD) + data[at:]
        else:
            tokens = list(re.finditer(rb"[A-Za-z0-9_.+-]+|\"[^\"\n]*\"", data[:200_000]))
            if tokens:
                token = dice.choice(tokens)
                new = dice.choice(ODD) if dice.random() < 0.7 else dice.choice(tokens)[0]
                data = data[: token.start()] + new + data[token.end() :]
    return data


def by_atheris(name, options):
    """libFuzzer ends a process at the first defect, so each target has one of its own."""
    command = [sys.executable, __file__, "--atheris", name, "--seconds", str(options.seconds), "--seed", str(options.seed)]
    ended = subprocess.run(command, capture_output=True, text=True)
    runs = re.findall(r"Done (\d+) runs|stat::number_of_executed_units:\s*(\d+)", ended.stderr)
    if ended.returncode:
        print(ended.stderr[ended.stderr.find("=== Uncaught") :][:3000], file=sys.stderr)
    return {"engine": "atheris", "runs": int(max(runs[-1])) if runs else 0, "broken": int(ended.returncode != 0)}


def guided(name, seconds, seed):
    """Never returns: atheris ends the process."""
    import atheris

    with atheris.instrument_imports(include=["m2lgdg", "tomllib", "json"]):
        import targets
    with tempfile.TemporaryDirectory() as folder:
        for i, data in enumerate(targets.SEEDS[name]()):
            (Path(folder) / str(i)).write_bytes(data)
        found = HERE / "found" / name
        found.mkdir(parents=True, exist_ok=True)
        flags = [f"-max_total_time={seconds}", f"-seed={seed + 1}", f"-artifact_prefix={found}/", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], *flags, "-max_len=65536", folder], targets.TARGETS[name])
        atheris.Fuzz()


if __name__ == "__main__":
    main()
