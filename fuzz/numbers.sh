#!/bin/sh
# Builds the C parser with the address and undefined-behaviour sanitizers and fuzzes it: libFuzzer where clang has it, else our own loop.
# Usage: fuzz/numbers.sh [SECONDS]; ends with another code than 0 where something broke.
set -e
here=$(dirname "$0")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
clang=$(command -v clang || command -v clang-14 || true)
checks="-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all"
if [ -n "$clang" ] && "$clang" $checks -fsanitize=fuzzer -DLIBFUZZER -o "$work/fuzz" "$here/numbers.c" -lm 2>/dev/null; then
    mkdir -p "$work/seeds" "$here/found/numbers"
    printf ',1.5,2e3\n-3,nan\n' > "$work/seeds/1"
    printf ' 1e22 1e-300\n0x1p3 inf\n' > "$work/seeds/2"
    "$work/fuzz" -max_total_time="${1:-60}" -max_len=4096 -artifact_prefix="$here/found/numbers/" -print_final_stats=1 "$work/seeds" 2> "$work/log" || { tail -40 "$work/log" >&2; exit 1; }
    runs=$(sed -n 's/stat::number_of_executed_units: *//p' "$work/log")
    echo "{\"target\": \"numbers.c\", \"engine\": \"libFuzzer\", \"runs\": $runs, \"broken\": 0}"
else
    cc $checks -o "$work/fuzz" "$here/numbers.c" -lm
    "$work/fuzz" "$((${1:-60} * 50000))"
fi
