#!/usr/bin/env bash
# agent HOST COMMAND-LINE: what ssh is to a real cluster, for one made by hpctk cluster.
#
# `hpctk cluster up` copies this file into the cluster's folder, from whose name it learns
# which cluster it belongs to, and mpirun calls it wherever it would call ssh. Unlike ssh it
# hands on the whole environment, the working folder and the standard streams.
#
# The mounts need no undoing: `ip netns exec` gives every command a mount namespace of its own,
# and they end with it. A private /dev/shm keeps hosts from sharing what real hosts cannot
# share, and leaves no segment of a killed job behind.
set -euo pipefail

folder=$(dirname "$0")
name=${folder##*/hpctk-cluster-}
host=$1
shift

# shellcheck disable=SC2016  # expanded by the shell inside the host
exec ip netns exec "hpctk-$name-$host" unshare --uts bash -euc '
    hostname "$1"
    mount --bind "$2/hosts" /etc/hosts
    mount -t tmpfs -o mode=1777 hpctk-shm /dev/shm
    exec bash -c "$3"
' agent "$host" "$folder" "$*"
