#!/usr/bin/env bash
# An emulated cluster on one machine: network namespaces are the hosts, veth pairs the cables,
# a bridge the switch, and a token bucket on both ends of every cable sets its rate.
#
# All that a cluster owns carries its name, so that `down` needs no memory to find it:
#
#   /run/netns/hpctk-NAME-switch          the bridge and one port per host
#   /run/netns/hpctk-NAME-h0, -h1, ...    a host each: lo and eth0 (198.18.0.1, .2, ...)
#   /run/hpctk-cluster-NAME/              hosts, hostfile, rate, agent, and tmp/ for mpirun
#
# Links are born inside the namespaces: the machine's own network never sees them, and clusters
# never see each other, which is why all of them can use the same addresses.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin

here=$(dirname "${BASH_SOURCE[0]}")
venv=${HPCTK_VENV:?hpctk cluster sets it}

usage() {
    cat <<'END'
usage: hpctk cluster COMMAND ...

An emulated cluster on this machine (root and iproute2 needed).

  up N [--rate RATE] [--name NAME]      start N hosts (1 to 64)
  run [--name NAME] [-n RANKS] [--with-ft] [--mpirun-args "..."] -- COMMAND...
                                        run an MPI job, by default one rank per host; --with-ft: it outlives ranks
  run [--name NAME] --host I -- COMMAND...
                                        run a command on host I, without MPI
  status [--name NAME]                  hosts, addresses, rate, processes (1 if none is up)
  down [--name NAME | --all]            end what runs there, remove everything
  with N [--rate RATE] [options of run] -- COMMAND...
                                        up, run and down in one; down also when interrupted

RATE  of every link, each way: 1mbit to 100gbit in whole mbit or gbit, or none (default 1gbit)
NAME  letters, digits and _, at most 16 (default: default; `with` takes a random one)

Python and mpirun come from the environment of this hpctk. A command finds in its environment,
besides all of yours:
  HPCTK_CLUSTER_NAME   NAME                  HPCTK_CLUSTER_HOSTS  N
  HPCTK_CLUSTER_RATE   RATE as given         HPCTK_CLUSTER_HEAD   the address of host 0
  GLOO_SOCKET_IFNAME   eth0
The exit status is the command's; 2 = wrong arguments, 77 = this machine cannot do it.

Examples:
  hpctk cluster with 4 -- python -m mpi4py train.py
  hpctk cluster with 4 --rate 100mbit -n 8 --mpirun-args "--tag-output" -- hostname
  hpctk cluster up 2 --rate 10gbit
  hpctk cluster run --host 1 -- ip -brief address
  hpctk cluster down
END
}

fail() { # fail STATUS MESSAGE
    printf 'hpctk cluster: %s\n' "$2" >&2
    exit "$1"
}

bad_argument() { fail 2 "$1 (hpctk cluster --help shows how)"; }

cannot() { fail 77 "cannot emulate a cluster here: $1"; }

check_machine() {
    ((EUID == 0)) || cannot "network namespaces need root: sudo \"\$(command -v hpctk)\" cluster ..."
    local tool
    for tool in ip tc; do
        command -v "$tool" >/dev/null || cannot "no '$tool' command: apt-get install iproute2"
    done
    for tool in unshare mount; do
        command -v "$tool" >/dev/null || cannot "no '$tool' command: apt-get install util-linux mount"
    done
}

# --- settings ---------------------------------------------------------------------------------

name=default
rate=1gbit
n_hosts=
n_ranks=
host=
mpirun_args=
with_ft=
all=
command=()

read_settings() { # read_settings ALLOWED ARGUMENT...: set the variables above
    local allowed=" $1 " value
    shift
    while (($#)); do
        if [[ $1 == --?*=* ]]; then
            set -- "${1%%=*}" "${1#*=}" "${@:2}"
        fi
        if [[ $1 == -h || $1 == --help ]]; then
            usage
            exit 0
        elif [[ $1 == -* && $allowed != *" $1 "* ]]; then
            bad_argument "unknown option '$1'; known here:${allowed/ N / }--help"
        elif [[ $1 == -- ]]; then
            command=("${@:2}")
            break
        elif [[ $1 == --all ]]; then
            all=yes
            shift
        elif [[ $1 == --with-ft ]]; then
            with_ft=yes
            shift
        elif [[ $1 == -* ]]; then
            (($# > 1)) && [[ $2 != -- ]] || bad_argument "$1 needs a value"
            value=$2
            case $1 in
                --name) name=$value ;;
                --rate) rate=$value ;;
                --host) host=$value ;;
                --mpirun-args) mpirun_args=$value ;;
                -n) n_ranks=$value ;;
            esac
            shift 2
        elif [[ $allowed == *" N "* && -z $n_hosts ]]; then
            n_hosts=$1
            shift
        else
            bad_argument "unexpected '$1'; a command to run goes after --"
        fi
    done

    [[ $name =~ ^[A-Za-z0-9_]{1,16}$ ]] || bad_argument "--name '$name': letters, digits and _, 1 to 16 of them"
    [[ $rate == none ]] || read_rate || bad_argument "--rate '$rate': 1mbit to 100gbit in whole mbit or gbit, or none"
    if [[ $allowed == *" N "* ]]; then
        in_range "$n_hosts" 1 64 || bad_argument "number of hosts '$n_hosts': 1 to 64"
    fi
    if [[ $allowed == *" -- "* ]]; then
        ((${#command[@]})) || bad_argument "nothing to run: give a command after --"
    fi
    if [[ -n $n_ranks ]]; then
        in_range "$n_ranks" 1 1024 || bad_argument "-n '$n_ranks': a number of ranks, 1 to 1024"
    fi
    if [[ -n $host ]]; then
        in_range "$host" 0 63 || bad_argument "--host '$host': the number of a host, from 0"
        [[ -z $n_ranks$mpirun_args$with_ft ]] ||
            bad_argument "--host runs without MPI: it excludes -n, --with-ft and --mpirun-args"
    fi
    use_name "$name"
}

use_name() {
    name=$1
    state=/run/hpctk-cluster-$name
    prefix=hpctk-$name
}

in_range() { # in_range VALUE LOW HIGH
    [[ $1 =~ ^(0|[1-9][0-9]{0,5})$ ]] && (($1 >= $2 && $1 <= $3))
}

read_rate() { # set rate_mbit from rate; fails if it is out of range
    [[ $rate =~ ^[1-9][0-9]{0,5}(mbit|gbit)$ ]] || return 1
    rate_mbit=${rate%[mg]bit}
    [[ $rate == *mbit ]] || rate_mbit=$((rate_mbit * 1000))
    ((rate_mbit <= 100000))
}

# --- what there is ----------------------------------------------------------------------------

namespaces() { # of this cluster, also of one that is half there
    ip netns list | sed -nE "s/^($prefix-(switch|h[0-9]+))( .*)?$/\1/p"
}

processes() { # in the given namespaces
    local namespace
    for namespace in "$@"; do
        ip netns pids "$namespace" 2>/dev/null || true
    done
}

names() { # of all clusters
    local folder
    {
        for folder in /run/hpctk-cluster-*; do
            [[ ! -d $folder ]] || echo "${folder#/run/hpctk-cluster-}"
        done
        ip netns list | sed -nE 's/^hpctk-([A-Za-z0-9_]+)-(switch|h[0-9]+)( .*)?$/\1/p'
    } | sort -u
}

# --- up and down ------------------------------------------------------------------------------

limit_rate() { # limit_rate NAMESPACE INTERFACE
    [[ $rate != none ]] || return 0
    # The bucket holds what the link carries in 2.1 ms (256 KiB at 1 Gbit/s): a fixed size would
    # let whole messages through unlimited on a slow link, and on a fast one run dry between
    # two ticks of the timer. Below 16 KiB the kernel's cutting of packets costs too much.
    local burst=$((rate_mbit * 262144 / 1000))
    ((burst >= 16384)) || burst=16384
    tc -n "$1" qdisc add dev "$2" root tbf rate "$rate" burst "${burst}b" latency 100ms ||
        cannot "no token bucket (tc tbf) in this kernel: modprobe sch_tbf"
}

add_host() { # add_host I
    local namespace=$prefix-h$1 port=port$1
    ip netns add "$namespace"
    ip -n "$prefix-switch" link add name "$port" type veth peer name eth0 netns "$namespace" ||
        cannot "no veth links in this kernel: modprobe veth"
    # addrgenmode none: without an IPv6 address nobody picks one by accident.
    ip -n "$prefix-switch" link set "$port" master switch addrgenmode none up
    ip -n "$namespace" link set lo up
    ip -n "$namespace" link set eth0 addrgenmode none up
    ip -n "$namespace" address add "198.18.0.$(($1 + 1))/24" dev eth0
    limit_rate "$namespace" eth0
    limit_rate "$prefix-switch" "$port"
    echo "198.18.0.$(($1 + 1)) h$1" >>"$state/hosts"
    echo "h$1 slots=1" >>"$state/hostfile.part"
}

up() {
    # The folder is the lock. A signal while it is made must neither leave it behind nor take
    # down a cluster that was there before: it waits until it is known whose folder this is.
    local interrupted=
    trap 'interrupted=129' HUP
    trap 'interrupted=130' INT
    trap 'interrupted=143' TERM
    if [[ -n $(namespaces) ]] || ! (trap '' HUP INT TERM && mkdir -m 700 "$state") 2>/dev/null; then
        fail 1 "cluster '$name' is already up, or left over; first: hpctk cluster down --name $name"
    fi
    trap take_down EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    [[ -z $interrupted ]] || exit "$interrupted"

    mkdir "$state/tmp"
    install -m 700 "$here/cluster_agent.sh" "$state/agent"
    echo "$rate" >"$state/rate"
    echo "127.0.0.1 localhost" >"$state/hosts"
    ip netns add "$prefix-switch" || cannot "no network namespaces: the container needs CAP_SYS_ADMIN"
    ip -n "$prefix-switch" link add name switch type bridge || cannot "no bridge in this kernel: modprobe bridge"
    ip -n "$prefix-switch" link set switch addrgenmode none up
    local i
    for ((i = 0; i < n_hosts; i++)); do
        add_host "$i"
    done
    mv "$state/hostfile.part" "$state/hostfile" # from here on `run` takes it as up
}

end_processes() { # end_processes NAMESPACE...: politely at first
    local signal try pids
    for signal in TERM KILL; do
        for ((try = 0; try < 30; try++)); do
            mapfile -t pids < <(processes "$@")
            ((${#pids[@]})) || return 0
            if ((try == 0)) || [[ $signal == KILL ]]; then
                kill -s "$signal" "${pids[@]}" 2>/dev/null || true
            fi
            sleep 0.1
        done
    done
    echo "hpctk cluster: still running on '$name' after SIGKILL: ${pids[*]}" >&2
}

job=

take_down() {
    trap '' HUP INT TERM
    local all_namespaces namespace
    # A job that has not entered its namespace yet would escape end_processes.
    [[ -z $job ]] || kill "$job" 2>/dev/null || true
    mapfile -t all_namespaces < <(namespaces)
    end_processes "${all_namespaces[@]}"
    for namespace in "${all_namespaces[@]}"; do
        ip netns delete "$namespace" 2>/dev/null || true # another `down` may have been faster
    done
    rm -rf "$state"
    [[ -z $job ]] || wait "$job" 2>/dev/null || true
}

# --- run --------------------------------------------------------------------------------------

leave_outer_job() { # inside a job of mpirun or srun, a new mpirun must not take itself for a rank
    local variable
    for variable in $(compgen -e); do
        case $variable in
            OMPI_MCA_*) ;;
            OMPI_* | PMIX_* | PMI_* | PRTE_* | HYDRA_* | SLURM_*) unset "$variable" ;;
        esac
    done
}

run() { # replaces this process
    [[ -e $state/hostfile ]] || fail 1 "no cluster '$name' is up; first: hpctk cluster up N --name $name"
    n_hosts=$(wc -l <"$state/hostfile")
    leave_outer_job
    unset DISPLAY
    PATH=$venv/bin:$PATH
    HPCTK_CLUSTER_RATE=$(<"$state/rate")
    export PATH HPCTK_CLUSTER_RATE HPCTK_CLUSTER_NAME=$name HPCTK_CLUSTER_HOSTS=$n_hosts
    export HPCTK_CLUSTER_HEAD=198.18.0.1 GLOO_SOCKET_IFNAME=eth0

    if [[ -n $host ]]; then
        ((host < n_hosts)) || bad_argument "--host '$host': cluster '$name' has hosts 0 to $((n_hosts - 1))"
        exec "$state/agent" "h$host" "exec ${command[*]@Q}"
    fi

    [[ -x $venv/bin/mpirun ]] || fail 1 "no mpirun in $venv/bin: pip install \"hpctk[mpi]\""
    : "${n_ranks:=$n_hosts}"
    # In the environment, where --mpirun-args can overrule it: mpirun refuses to start when its
    # arguments give one parameter two values.
    export OMPI_MCA_pml=ob1 OMPI_MCA_btl=tcp,self OMPI_MCA_btl_tcp_if_include=eth0
    ((n_ranks <= n_hosts)) || OMPI_MCA_btl=tcp,sm,self
    # A waiting rank polls. Open MPI yields the core where a host has more ranks than cores, but
    # every emulated host counts all cores of this machine as its own.
    ((n_ranks <= $(nproc))) || export OMPI_MCA_mpi_yield_when_idle=1
    # Open MPI 5.0.11 can lose a rank that ends within milliseconds, on another host than mpirun's,
    # and then waits for it for ever: a misspelt file name would hang a benchmark.
    # shellcheck disable=SC2016  # expanded on the host
    local extra linger='sleep 0.2; exec "$@"'
    read -r -a extra <<<"$mpirun_args"
    [[ -z $with_ft ]] || extra=(--with-ft ulfm "${extra[@]}")
    local line=(
        "$venv/bin/mpirun" --allow-run-as-root
        --hostfile "$state/hostfile" -n "$n_ranks" --map-by node:OVERSUBSCRIBE --bind-to none
        --prtemca plm ssh --prtemca plm_ssh_agent "$state/agent"
        --prtemca prte_if_include eth0 --prtemca prte_tmpdir_base "$state/tmp"
        "${extra[@]}" bash -c "$linger" rank "${command[@]}"
    )
    exec "$state/agent" h0 "exec ${line[*]@Q}"
}

# --- the commands -----------------------------------------------------------------------------

command_up() {
    read_settings "N --rate --name" "$@"
    check_machine
    up
    trap - EXIT
    echo "cluster '$name': $n_hosts hosts, $rate; end it with: hpctk cluster down --name $name"
}

command_run() {
    read_settings "--name -n --host --with-ft --mpirun-args --" "$@"
    check_machine
    run
}

command_with() {
    name=$(od -An -N6 -tx1 /dev/urandom | tr -d ' \n')
    read_settings "N --rate -n --host --with-ft --mpirun-args --" "$@"
    check_machine
    [[ -z $host ]] || ((host < n_hosts)) || bad_argument "--host '$host': there are hosts 0 to $((n_hosts - 1))"
    up
    # In the background, because a trap waits for a command in the foreground to end.
    (
        trap - INT QUIT
        run
    ) <&0 &
    job=$!
    local status=0
    wait "$job" 2>/dev/null || status=$? # without the shell's remark about a killed job
    job=
    exit "$status"
}

show() {
    local address label
    if [[ ! -e $state/hostfile ]]; then
        echo "cluster '$name' is not up"
        return 1
    fi
    echo "cluster '$name': $(wc -l <"$state/hostfile") hosts, rate $(<"$state/rate")"
    while read -r address label; do
        [[ $label != localhost ]] || continue
        echo "  $label  $address  processes: $(processes "$prefix-$label" | paste -sd ' ')"
    done <"$state/hosts"
}

command_status() {
    local each found=1
    read_settings "--name" "$@"
    check_machine
    if (($#)); then
        show
        return
    fi
    for each in $(names); do
        use_name "$each"
        show && found=0
    done
    ((found == 0)) || echo "no cluster is up"
    return "$found"
}

command_down() {
    local each
    read_settings "--name --all" "$@"
    check_machine
    if [[ -z $all ]]; then
        take_down
        return
    fi
    for each in $(names); do
        use_name "$each"
        take_down
    done
}

case ${1-} in
    up | run | with | status | down) "command_$1" "${@:2}" ;;
    -h | --help | help) usage ;;
    '') usage >&2; exit 2 ;;
    *) bad_argument "unknown command '$1'; known: up run with status down" ;;
esac
