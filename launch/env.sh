# shellcheck shell=bash
# Sourced by the scripts beside it: where the project and its virtual environment are, and what a local MPI job needs.

HPCTK_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
HPCTK_VENV=${HPCTK_VENV:-$HPCTK_ROOT/.venv}
HPCTK_CACHE=${HPCTK_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hpctk}
export HPCTK_VENV HPCTK_CACHE

# Ranks share the cores of one machine here: more threads per rank only fight each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 2
}

use_venv() { # use_venv DIR: its programs come first
    export VIRTUAL_ENV=$1
    export PATH="$1/bin:$PATH"
}

# What launch/setup has written down about Horovod in the environment: what it was built for, or "left out"; nothing
# where nobody has asked for it.
horovod_state() { cat "$HPCTK_VENV/hpctk-horovod" 2>/dev/null || true; }

# Set up, with Horovod unless it was left out or there is no compiler. Return 1 where it could not be built and all else
# is there.
set_up_with_horovod() {
    local status=0 wanted=(--with-horovod)
    [ "$(horovod_state)" != 'left out' ] || wanted=()
    "$HPCTK_ROOT/launch/setup" ${wanted[@]+"${wanted[@]}"} || status=$?
    case $status in
    0 | 3) return 0 ;;
    *)
        "$HPCTK_ROOT/launch/setup" || exit "$status"
        return 1
        ;;
    esac
}

# local_mpirun N CMD...: N ranks on this machine, by whichever MPI the environment in use holds.
local_mpirun() {
    HPCTK_VENV=${VIRTUAL_ENV:-$HPCTK_VENV} "$HPCTK_ROOT/launch/mpirun" -n "$@"
}
