#!/usr/bin/env bash
# A newcomer's path: clones what is committed, sets it up as README says, and runs every `sh` block of README and docs,
# page after page. Run lengths are cut down by docs/make/blocks.py, nothing else is changed.
#
#   tests/newcomer.sh                 all pages
#   tests/newcomer.sh PAGE ...        these, after README.md's `make train`
#
# NEWCOMER_DIR   where to work (a new folder of the system's temporary ones; removed at the end, if all went well)
# PYTHON         which Python to begin with
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=${NEWCOMER_DIR:-$(mktemp -d)}
clone=$work/slipstream
# What the shell that starts this has set up is not the newcomer's.
unset VIRTUAL_ENV PYTHONPATH PYTHONHOME
export OMP_NUM_THREADS=1
mkdir -p "$work"

[ -d "$clone" ] || git clone --quiet "$root" "$clone"
cd "$clone"
export PATH="$clone/.venv/bin:$PATH"

failed=0
step() {
    local begin=$SECONDS
    printf '%s $ %s\n' "$(date +%T)" "$*"
    if "$@" >"$work/output" 2>&1 </dev/null; then
        printf '         ok, %ss\n' "$((SECONDS - begin))"
    else
        printf '         FAILED (exit %s), %ss\n' "$?" "$((SECONDS - begin))"
        tail -n 25 "$work/output" | sed 's/^/         | /'
        failed=$((failed + 1))
    fi
}

# Runs that take minutes become runs that take seconds.
shorten_configs() {
    sed -i -E 's/^seeds = .*/seeds = [0, 1]/; s/num_steps = [0-9]+/num_steps = 8/; s/lr_total_steps = [0-9]+/lr_total_steps = 8/;
        s/lr_warmup_steps = [0-9]+/lr_warmup_steps = 2/; s/num_sequences = [0-9]+/num_sequences = 16/' \
        configs/*.toml configs/compare/*.toml configs/compare/base/*.toml
}

step make venv
[ "$failed" = 0 ] || exit 1
if [ $# -gt 0 ]; then
    pages=("$@")
else
    mapfile -t pages < <(python -c 'import sys; sys.path.insert(0, "docs/make"); import blocks; print(*blocks.pages(), sep="\n")')
fi
[ -d runs/demo ] || step make train
shorten_configs
for page in "${pages[@]}"; do
    script=$(python docs/make/blocks.py "$page")
    [ -n "$script" ] || continue
    printf '== %s\n' "$page"
    # Each page begins with what `make train` and a newcomer's own text leave, and nothing else.
    git clean --quiet -xdf --exclude .venv --exclude runs --exclude '*.egg-info'
    find runs -mindepth 1 -maxdepth 1 ! -name demo ! -name demo-sync -exec rm -rf {} +
    mkdir -p corpus
    cp src/slipstream/data/texts/*.txt.gz corpus/
    eval "$script"
done
if [ "$failed" = 0 ]; then
    echo "every command works"
    [ -n "${NEWCOMER_DIR:-}" ] || rm -rf "$work"
else
    echo "$failed commands failed; all is left in $work"
    exit 1
fi
