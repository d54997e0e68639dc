#!/usr/bin/env bash
# Builds, tests and times the device tier on a machine with a GPU, in under 10 minutes, and writes
# one small JSON: which GPU, how the tests went, the figures, and the thresholds they are held to.
#
#   bench/gpu/run.sh [options] [OUT]            default of OUT: ./gpu.json
#     --library PATH   another driver's library: with the fake one, to see that the script works
#     --trace PATH     the trace to replay (default: a made-up one)
#     --pack DIR       only build, and put all that a GPU machine needs into DIR: this script, the
#                      test programs and kvtide-bench, for a machine that has no Rust
#     --packed DIR     build nothing; run what --pack has made
#
# Needs the Rust toolchain and a C++ compiler (with --packed: neither), and no CUDA toolkit. Every
# step has a time limit of its own, and one that fails stops no other. Exit code: 0 when every test
# passed and no byte was wrong, 1 otherwise; the thresholds do not change it.
set -u -o pipefail

library="" trace="" pack="" packed="" out="gpu.json"
while [ $# -gt 0 ]; do
    case "$1" in
        --library) library=$(realpath -e "$2") || exit 2; shift 2 ;;
        --trace) trace=$(realpath -e "$2") || exit 2; shift 2 ;;
        --pack) pack=$2; shift 2 ;;
        --packed) packed=$(realpath -e "$2") || exit 2; shift 2 ;;
        -h | --help) sed -n '2,17p' "$0"; exit 0 ;;
        -*) echo "run.sh: unknown option $1; see --help" >&2; exit 2 ;;
        *) out=$1; shift ;;
    esac
done
mkdir -p "$(dirname "$out")" || exit 2
out=$(realpath -m "$out")
here=$(cd "$(dirname "$0")" && pwd)

# Ends within this many seconds, whatever the steps do.
total_s=570
started=$(date +%s)
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
steps="" failed=0

elapsed() { echo $(($(date +%s) - started)); }

# step NAME LIMIT_S COMMAND...: runs it, with its output in $work/NAME.{out,err}, and notes how it went.
step() {
    local name=$1 limit=$2 left from code how
    shift 2
    left=$((total_s - $(elapsed)))
    [ "$limit" -gt "$left" ] && limit=$left
    from=$(date +%s)
    if [ "$limit" -lt 2 ]; then
        code=124
    else
        timeout --kill-after=5 "$limit" "$@" >"$work/$name.out" 2>"$work/$name.err" </dev/null
        code=$?
    fi
    case $code in
        0) how=passed ;;
        124 | 137) how="timed out" ;;
        *) how=failed ;;
    esac
    if [ $code -eq 0 ] && grep -qs SKIPPED "$work/$name.out" "$work/$name.err"; then
        how=skipped
        # With a real GPU nothing may be skipped for want of one.
        [ -z "$library" ] && failed=1
    fi
    [ $code -ne 0 ] && failed=1
    note "$name" "$how" $(($(date +%s) - from))
    if [ $code -ne 0 ]; then
        tail -n 15 "$work/$name.out" "$work/$name.err" >&2
    fi
    return $code
}

note() {
    printf '%-28s %-10s %4s s\n' "$1" "$2" "$3" >&2
    steps="$steps${steps:+, }\"$1\": {\"result\": \"$2\", \"seconds\": $3}"
}

# The last line of a step's output, when it is a JSON object; else null.
json_of() {
    local line
    line=$(tail -n 1 "$work/$1.out" 2>/dev/null)
    case $line in
        "{"*"}") printf '%s' "$line" ;;
        *) printf null ;;
    esac
}

# "N passed, M failed" of a test program.
counts_of() {
    sed -n 's/^test result: [^.]*\. \([0-9]*\) passed; \([0-9]*\) failed.*/"passed": \1, "failed": \2/p' \
        "$work/$1.out" 2>/dev/null | tail -n 1
}

# The test programs, as PACKAGE:TEST; those run on the GPU.
tests="kvtide-kernels:launchers_on_a_gpu kvtide-tiers:device_suite kvtide-tiers:device_by_the_driver"

# Puts kvtide-bench and the test programs into the folder $1.
build() {
    local to=$1 package test executable
    mkdir -p "$to" && cd "$here/../.." || return
    step build-bench 300 cargo build --release --locked -p kvtide-bench || return
    cp "${CARGO_TARGET_DIR:-target}/release/kvtide-bench" "$to/"
    for package in kvtide-kernels kvtide-tiers; do
        set --
        for test in $tests; do
            [ "${test%%:*}" = $package ] && set -- "$@" --test "${test#*:}"
        done
        step "build-tests-of-$package" 240 cargo test --release --locked --no-run \
            --message-format=json -p $package --features cuda "$@" || continue
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' "$work/build-tests-of-$package.out" |
            while read -r executable; do
                test=$(basename "$executable")
                cp "$executable" "$to/${test%-*}"
            done
    done
    # The suites look for the fake driver beside them.
    for executable in "${CARGO_TARGET_DIR:-target}"/release/{deps/,}libfakecuda.so; do
        [ -f "$executable" ] && cp "$executable" "$to/" && break
    done
    return 0
}

# A trace of conversations that come back: turns of 40 sessions behind 4 common beginnings.
made_up_trace() {
    awk 'BEGIN {
        state = 7
        for (turn = 0; turn < 1200; turn++) {
            state = (state * 16807) % 2147483647
            session = state % 40
            new = 2 + int(state / 40) % 4
            of = -1; shared = 0
            if (session in last) { of = last[session]; shared = blocks[of] }
            else if (session >= 4 && (session % 4) in last) { of = last[session % 4]; shared = 2 }
            # A conversation that has grown long starts anew.
            if (shared > 60) { of = -1; shared = 0 }
            last[session] = turn; blocks[turn] = shared + new
            printf "%d,%d,10,%d,0,%d,%d,%d\n", turn, (shared + new) * 64, session, of, shared, new
        }
    }'
}

if [ -n "$pack" ]; then
    mkdir -p "$pack" || exit 2
    pack=$(realpath "$pack")
    build "$pack"
    strip "$pack"/* 2>/dev/null
    cp "$here/run.sh" "$pack/"
    du -sh "$pack" >&2
    exit $failed
fi

programs=$packed
if [ -z "$programs" ]; then
    programs=$work/programs
    build "$programs"
fi
cd "$work" || exit 2

results=""
for test in $tests; do
    name=${test#*:}
    program=$programs/$name
    if [ ! -x "$program" ]; then
        note "$name" "not built" 0
        failed=1
        continue
    fi
    # On a real GPU the suites ask for it by this variable; without it they take the fake driver.
    real=1
    [ -n "$library" ] && real=0
    # Tests share one GPU: a few at a time.
    step "$name" 120 env KVTIDE_TEST_GPU=$real "$program" --test-threads=4
    counts=$(counts_of "$name")
    results="$results${results:+, }\"$name\": {${counts:-\"passed\": 0, \"failed\": 0}}"
done

set --
[ -n "$library" ] && set -- --library "$library" --quick
step device 120 "$programs/kvtide-bench" device --json --require "$@"

[ -z "$trace" ] && trace=$work/trace.csv && made_up_trace >"$trace"
set -- --device-bytes 1GiB --host-bytes 2GiB --block-bytes 2MiB --requests 1200
if [ -n "$library" ]; then
    set -- --device-bytes 64MiB --host-bytes 128MiB --block-bytes 256KiB --requests 300 \
        --device-library "$library"
fi
for share in legacy vmm; do
    step "replay-$share" 60 "$programs/kvtide-bench" replay --json --trace "$trace" \
        --nvme-bytes 4GiB --clients 4 --device-share $share --store "$work/store-$share" "$@"
    rm -rf "$work/store-$share"
done

smi=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null |
    head -n 1 | tr -d '"\\')
cat >"$out" <<END
{
"nvidia_smi": "$smi",
"kernel": "$(uname -r)",
"fake": $([ -n "$library" ] && echo true || echo false),
"seconds": $(elapsed),
"steps": {$steps},
"tests": {$results},
"device": $(json_of device),
"replay_legacy": $(json_of replay-legacy),
"replay_vmm": $(json_of replay-vmm)
}
END
echo "$out: $(wc -c <"$out") bytes, after $(elapsed) s" >&2
exit $failed
