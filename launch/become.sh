# shellcheck shell=bash
# Sourced by the wrappers: run hpctk/launch/start.py with any Python that is new enough, and be replaced by it.

become() { # become NAME ARGUMENT...
    local project python
    project=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
    for python in "${HPCTK_VENV:-$project/.venv}/bin/python" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" python3; do
        # Isolated: neither the current folder nor PYTHONPATH, which are the job's, may stand in for a module.
        if "$python" -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            exec "$python" -I -c \
                'import sys; sys.path.insert(0, sys.argv[1]); from hpctk.launch.start import main; sys.exit(main(sys.argv[2], sys.argv[1], sys.argv[3:]))' \
                "$project" "$@"
        fi
    done
    echo "launch/$1: no Python 3.11 here: ./launch/setup makes an environment" >&2
    exit 2
}
