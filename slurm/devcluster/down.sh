#!/usr/bin/env bash
# down.sh - stop the cluster of up.sh (only processes named by its own pid files, and job steps of its own slurmd's).
#   --purge  also remove jobs, accounting and logs (the next up.sh starts from job id 1)
set -uo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
S=${RLINF_DEVCLUSTER_DIR:-/tmp/rlinf-devcluster}
export PATH=$PATH:/usr/sbin:/sbin LC_ALL=C SLURM_CONF=$S/etc/slurm.conf
[ -d "$S/run" ] || { echo "down.sh: nothing in $S"; exit 0; }
cmd() { { tr '\0' ' ' <"/proc/$1/cmdline"; } 2>/dev/null; }
env_has() { { tr '\0' '\n' <"/proc/$1/environ"; } 2>/dev/null | grep -q -- "^$2"; }
pid_of() { # NAME SUBSTR -> pid if alive (a zombie's command line is empty) and ours
  local p; p=$(cat "$S/run/$1.pid" 2>/dev/null) || return 1
  [ -n "$p" ] && [[ "$(cmd "$p")" == *"$2"* ]] && { [[ "$2" == *"$S"* ]] || env_has "$p" "SLURM_CONF=$S/etc/slurm.conf"; } && echo "$p"; }
stop() { # NAME SUBSTR [tenths of a second before SIGKILL]
  local p i; p=$(pid_of "$1" "$2") || return 0
  kill "$p" 2>/dev/null
  for ((i=0; i<${3:-100}*2; i++)); do [ -n "$(cmd "$p")" ] || { echo "  stopped $1 ($p)"; rm -f "$S/run/$1.pid"; return 0; }; sleep 0.05; done
  kill -9 "$p" 2>/dev/null; sleep 0.1; echo "  killed $1 ($p)"; rm -f "$S/run/$1.pid"; }
left() { # pids of job steps and job processes of THIS cluster that outlived it (slurmd gives both variables to all of them)
  local d p; for d in /proc/[0-9]*; do p=${d#/proc/}
    [ "$p" != $$ ] && env_has "$p" "SLURM_CONF=$S/etc/slurm.conf" && { env_has "$p" "SLURMD_NODENAME=" || [[ "$(cmd "$p")" == *slurmstepd* ]]; } && echo "$p"; done; }
if pid_of slurmctld slurmctld >/dev/null; then
  ids=$(timeout 5 squeue -h -o %A 2>/dev/null | sort -u | tr '\n' ' ')
  if [ -n "${ids// /}" ]; then
    timeout 5 scancel $ids 2>/dev/null
    for i in $(seq 60); do [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break; sleep 0.1; done
    ids=$(timeout 5 squeue -h -o %A 2>/dev/null | sort -u | tr '\n' ' '); [ -n "${ids// /}" ] && timeout 5 scancel --signal=KILL --full $ids 2>/dev/null && sleep 0.5
  fi
fi
for f in "$S"/run/slurmd-*.pid; do [ -e "$f" ] && { n=$(basename "$f" .pid); stop "$n" "slurmd -N ${n#slurmd-}" & }; done; wait
for p in $(left); do echo "  leftover job process $p ($(cmd "$p" | cut -c1-40)): killed"; kill -9 "$p" 2>/dev/null; done
stop slurmctld slurmctld; stop slurmdbd slurmdbd
stop mariadbd "$S/etc/my.cnf" 200
stop munged "$S/munge/munge.socket.2"
P=$(sed -n 's/^SlurmctldPort=//p' "$S/etc/slurm.conf" 2>/dev/null); BR=rlf$(( ${P:-26817} - 17 ))
if command -v ip >/dev/null && ip link show "$BR" >/dev/null 2>&1; then
  for ns in $(ip netns list 2>/dev/null | awk '{print $1}' | grep "^$BR-"); do ip netns del "$ns"; done; ip link del "$BR"; echo "  removed bridge $BR"; fi
if [ -e "$S/etc/cgroup.conf" ]; then for n in $(sed -n 's/^NodeName=\([^ ]*\).*/\1/p' "$S/etc/slurm.conf"); do find /sys/fs/cgroup/*/"slurm_$n" -depth -type d -exec rmdir {} \; 2>/dev/null; done; fi
[ "$(readlink /etc/slurm/slurm.conf 2>/dev/null)" = "$S/etc/slurm.conf" ] && rm -f /etc/slurm/slurm.conf
rm -f "$S/run/sig"
[ "${1:-}" = --purge ] && { rm -rf "$S"; echo "  purged $S"; }
echo "down"
