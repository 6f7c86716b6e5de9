#!/usr/bin/env bash
# up.sh - bring up a real multi-node Slurm cluster (munge, mariadb, slurmdbd, slurmctld, N x slurmd)
# on ONE Debian 12 machine, as root, without systemd. Idempotent. Stop it with down.sh.
#
#   ./up.sh            start (or leave running) the cluster;  then:  . $RLINF_DEVCLUSTER_DIR/env.sh
#   ./up.sh --fresh    stop, wipe jobs + accounting, start again (job ids restart at 1)
#
# Environment (all optional):
#   RLINF_DEVCLUSTER_DIR    state folder                       [/tmp/rlinf-devcluster]  (keep it short: unix sockets <=107 chars)
#   RLINF_DEVCLUSTER_PORT   base of the TCP ports              [26800]  ctld=+17 dbd=+19 slurmd=+101,+102,...
#   RLINF_DEVCLUSTER_MODE   uts | net | plain                  [uts]
#        uts  : every slurmd has its own UTS+mount namespace: `hostname` = node name, private /etc/hosts,
#               node addresses 127.0.77.11, .12, ... on the shared loopback
#        net  : uts + its own network namespace (veth + bridge, 10.77.0.11, .12, ...)
#               (both: inside the nodes $RLINF_DEVCLUSTER_DIR/etc is mounted on /etc/slurm, so programs that drop SLURM_CONF work)
#        plain: no namespaces at all (`hostname` = the machine's), all nodes on 127.0.0.1
#   RLINF_DEVCLUSTER_NODES  "name:gputype:count ..."           [a100-1:a100:4 a100-2:a100:4 h100-1:h100:4 h100-2:h100:4 cpu-1::0]
#   RLINF_DEVCLUSTER_CPUS / RLINF_DEVCLUSTER_MEM   claimed per node    [8 / 16000 MiB]
#   RLINF_DEVCLUSTER_BIND   yes: tasks are bound to the CPUs of their step, as on most clusters (task/affinity by cores; with
#               PROCTRACK=cgroup also ConstrainCores). CPUS is then by default what the machine has: nodes that claim more
#               are not bound. All nodes bind to the same CPUs, so that jobs of several nodes slow each other. [no]
#   RLINF_DEVCLUSTER_GRACE  GraceTime of partition spot (s)    [5]
#   RLINF_DEVCLUSTER_CRED_EXPIRE  s; a requeued job starts this + 1 s later  [5]
#   RLINF_DEVCLUSTER_PROCTRACK  linuxproc | pgid | cgroup      [linuxproc]  (cgroup: +task/cgroup +ConstrainDevices)
#   RLINF_DEVCLUSTER_STRICT yes: rules of strict sites. BIND=yes and PROCTRACK=cgroup, with ConstrainRAMSpace; jobs must name their
#               time limit; partitions of GPUs accept only the QOS gpu and refuse jobs without GPUs; partition whole gives whole nodes. [no]
set -euo pipefail
trap 'echo "up.sh: failed at line $LINENO" >&2' ERR
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
S=${RLINF_DEVCLUSTER_DIR:-/tmp/rlinf-devcluster}
PORT=${RLINF_DEVCLUSTER_PORT:-26800}
MODE=${RLINF_DEVCLUSTER_MODE:-uts}
NODES=${RLINF_DEVCLUSTER_NODES:-a100-1:a100:4 a100-2:a100:4 h100-1:h100:4 h100-2:h100:4 cpu-1::0}
STRICT=${RLINF_DEVCLUSTER_STRICT:-no}; LOOSE=no; LINUXPROC=linuxproc; [ "$STRICT" = yes ] && { LOOSE=yes; LINUXPROC=cgroup; }
BIND=${RLINF_DEVCLUSTER_BIND:-$LOOSE}; CPUS=8; CPUBIND=; [ "$BIND" = yes ] && { CPUS=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc); CPUBIND=CpuBind=core; }
CPUS=${RLINF_DEVCLUSTER_CPUS:-$CPUS}; MEM=${RLINF_DEVCLUSTER_MEM:-16000}
GRACE=${RLINF_DEVCLUSTER_GRACE:-5}; CREDEXP=${RLINF_DEVCLUSTER_CRED_EXPIRE:-5}; PROCTRACK=${RLINF_DEVCLUSTER_PROCTRACK:-$LINUXPROC}
BR=rlf$PORT; NET=10.77.0
T0=$(date +%s%N); now() { echo "$(( ($(date +%s%N)-T0)/1000000 )) ms"; }
say() { printf '[%8s] %s\n' "$(now)" "$*"; }
die() { echo "up.sh: $*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || die "run as root"
[ "${#S}" -le 80 ] || die "state folder path too long for unix sockets: $S"
export PATH=$PATH:/usr/sbin:/sbin LC_ALL=C
# one up.sh at a time per state folder (flock -o: the daemons must not inherit the lock)
[ -n "${RLINF_DEVCLUSTER_LOCKED:-}" ] || { mkdir -p "$(dirname "$S")"; RLINF_DEVCLUSTER_LOCKED=1 exec flock -o "$S.lock" "$0" "$@"; }
unset RLINF_DEVCLUSTER_LOCKED
[ "${1:-}" = --fresh ] && { RLINF_DEVCLUSTER_DIR=$S RLINF_DEVCLUSTER_PORT=$PORT "$HERE/down.sh" --purge; }

# ---------------------------------------------------------------- packages
need=()
for p in slurmctld:slurmctld slurmd:slurmd slurmdbd:slurmdbd sbatch:slurm-client munged:munge mariadbd:mariadb-server; do
  command -v "${p%%:*}" >/dev/null || need+=("${p##*:}")
done
compgen -G '/usr/lib/*/slurm-wlm/accounting_storage_mysql.so' >/dev/null || need+=(slurm-wlm-mysql-plugin)
[ "$MODE" = net ] && ! command -v ip >/dev/null && need+=(iproute2)
if [ ${#need[@]} -gt 0 ]; then
  say "apt-get install ${need[*]}"
  export DEBIAN_FRONTEND=noninteractive
  made=; [ -e /usr/sbin/policy-rc.d ] || { printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d; chmod +x /usr/sbin/policy-rc.d; made=1; }
  inst() { apt-get -y -q install --no-install-recommends "${need[@]}" slurm-wlm-mysql-plugin >"$1" 2>&1; }
  inst /tmp/rlinf-devcluster-apt.log || { apt-get -q update >>/tmp/rlinf-devcluster-apt.log 2>&1; inst /tmp/rlinf-devcluster-apt2.log || { tail -n 20 /tmp/rlinf-devcluster-apt2.log; die "apt-get install failed"; }; }
  [ -n "$made" ] && rm -f /usr/sbin/policy-rc.d
  say "packages installed"
fi

# ---------------------------------------------------------------- helpers
mkdir -p "$S"/{etc,log,run,ctl,spool,dev,munge}; chmod 755 "$S" "$S/munge"
# alive NAME SUBSTR: the pid file names a live process of THIS cluster whose command line holds SUBSTR
alive() { local p; p=$(cat "$S/run/$1.pid" 2>/dev/null) && [ -n "$p" ] && [[ "$({ tr '\0' ' ' <"/proc/$p/cmdline"; } 2>/dev/null)" == *"$2"* ]] && { [[ "$2" == *"$S"* ]] || { tr '\0' '\n' <"/proc/$p/environ"; } 2>/dev/null | grep -qx "SLURM_CONF=$S/etc/slurm.conf"; }; }
wait_for() { local n=0; until "${@:2}" >/dev/null 2>&1; do n=$((n+1)); [ $n -lt "$1" ] || return 1; sleep 0.05; done; }
port_open() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

if [ "$MODE" != plain ] && ! unshare -u -m true 2>/dev/null; then say "no UTS/mount namespaces here: RLINF_DEVCLUSTER_MODE=plain"; MODE=plain; fi
if [ "$MODE" = net ] && ! unshare -n true 2>/dev/null; then say "no network namespaces here: RLINF_DEVCLUSTER_MODE=uts"; MODE=uts; fi
case $MODE in net) CTLADDR=$NET.1; pre=$NET.;; uts) CTLADDR=127.0.0.1; pre=127.0.77.;; plain) CTLADDR=127.0.0.1; pre=;; *) die "RLINF_DEVCLUSTER_MODE=$MODE?";; esac
HOST=$(hostname -s)

# a running cluster with another configuration is restarted, with the same one it is kept
SIG="$MODE|$PORT|$NODES|$CPUS|$MEM|$GRACE|$CREDEXP|$PROCTRACK|$BIND|$STRICT|$HOST|$(cksum <"$HERE/up.sh")"
if [ -e "$S/run/sig" ] && [ "$(cat "$S/run/sig")" != "$SIG" ]; then say "configuration changed: restarting"; RLINF_DEVCLUSTER_DIR=$S "$HERE/down.sh"; mkdir -p "$S/run"; fi

# ---------------------------------------------------------------- configuration files
[ -s "$S/etc/munge.key" ] || { head -c 1024 /dev/urandom >"$S/etc/munge.key"; chmod 600 "$S/etc/munge.key"; }
nodelines=; greslines=; hosts="127.0.0.1 localhost"$'\n'"$CTLADDR $HOST slurmctl"$'\n'; names=(); i=0
declare -A part=() addr=()
for spec in $NODES; do
  IFS=: read -r n gt gc <<<"$spec"; i=$((i+1)); names+=("$n")
  a=127.0.0.1; [ -n "$pre" ] && a=$pre$((10+i)); addr[$n]=$a
  p=$((PORT+100+i)); hn=$n; [ "$MODE" = plain ] && hn=$HOST
  l="NodeName=$n NodeHostname=$hn NodeAddr=$a Port=$p CPUs=$CPUS RealMemory=$MEM $CPUBIND Feature=${gt:-cpu}"
  if [ "${gc:-0}" -gt 0 ]; then
    l+=" Gres=gpu:$gt:$gc Weight=10"
    # a GPU is a char device node that nobody opens (major 195 = nvidia, no driver behind it). The name must end in its index.
    for ((g=0; g<gc; g++)); do [ -c "$S/dev/gpu$g" ] || ${RLINF_DEVCLUSTER_MKNOD:-mknod} "$S/dev/gpu$g" c 195 $g 2>/dev/null || ln -sf /dev/null "$S/dev/gpu$g"; done
    idx=0; [ "$gc" -gt 1 ] && idx="[0-$((gc-1))]"
    greslines+="NodeName=$n Name=gpu Type=$gt File=$S/dev/gpu$idx"$'\n'
  fi
  nodelines+=$l$'\n'; hosts+="$a $n"$'\n'; part[${gt:-cpu}]+=",$n"
done
partlines=; gpunodes=; tres=; gpurules=; rules=; enforce=
[ "$STRICT" = yes ] && { gpurules="AllowQos=gpu QOS=needgpu"; rules=JobSubmitPlugins=require_timelimit; enforce=,safe; }
for t in "${!part[@]}"; do
  d=$gpurules; [ "$t" = cpu ] && d=Default=YES
  [ "$t" != cpu ] && { gpunodes+=${part[$t]}; tres+=",gres/gpu:$t"; }
  partlines+="PartitionName=$t Nodes=${part[$t]#,} $d PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP"$'\n'
done
if [ -n "$gpunodes" ]; then
  partlines+="PartitionName=gpu  Nodes=${gpunodes#,} $gpurules PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP"$'\n'
  partlines+="PartitionName=spot Nodes=${gpunodes#,} $gpurules PriorityTier=1 PreemptMode=REQUEUE GraceTime=$GRACE MaxTime=INFINITE State=UP"$'\n'
fi
[ "$STRICT" = yes ] && [ -n "${part[cpu]:-}" ] && partlines+="PartitionName=whole Nodes=${part[cpu]#,} OverSubscribe=EXCLUSIVE PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP"$'\n'
printf %s "$hosts" >"$S/etc/hosts"
printf '%s' "$greslines" >"$S/etc/gres.conf"
TASK=task/none; [ "$BIND" = yes ] && TASK=task/affinity
if [ "$PROCTRACK" = cgroup ]; then
  [ "$BIND" = yes ] && TASK=task/cgroup,task/affinity || TASK=task/cgroup
  printf 'CgroupPlugin=cgroup/v1\nConstrainDevices=yes\nConstrainCores=%s\nConstrainRAMSpace=%s\n' "$BIND" "$STRICT" >"$S/etc/cgroup.conf"
else rm -f "$S/etc/cgroup.conf"; fi

cat >"$S/etc/my.cnf" <<EOF
[mariadbd]
user=root
datadir=$S/db
socket=$S/run/db.sock
pid-file=$S/run/mariadbd.pid
log-error=$S/log/mariadbd.log
skip-networking
skip-log-bin
performance_schema=off
innodb_buffer_pool_size=64M
innodb_log_file_size=16M
innodb_lock_wait_timeout=900
# throw-away data: durability off
innodb_flush_log_at_trx_commit=0
innodb_doublewrite=0
innodb_flush_method=nosync
innodb_fast_shutdown=1
EOF
cat >"$S/etc/slurmdbd.conf" <<EOF
AuthType=auth/munge
AuthInfo=socket=$S/munge/munge.socket.2
DbdHost=$HOST
DbdAddr=$CTLADDR
DbdPort=$((PORT+19))
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
LogFile=$S/log/slurmdbd.log
PidFile=$S/run/slurmdbd.pid
DebugLevel=info
EOF
chmod 600 "$S/etc/slurmdbd.conf"
# What Slurm would mail is kept, one line each.
printf '#!/bin/sh\necho "$@" >>%s\n' "$S/log/mail.log" >"$S/etc/mail"; chmod 755 "$S/etc/mail"
cat >"$S/etc/slurm.conf" <<EOF
ClusterName=dev
SlurmctldHost=$HOST($CTLADDR)
SlurmctldPort=$((PORT+17))
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire: a requeued job may only start again cred_expire+1 s later (default 121 s)
AuthInfo=socket=$S/munge/munge.socket.2,cred_expire=$CREDEXP
StateSaveLocation=$S/ctl
SlurmdSpoolDir=$S/spool/%n
SlurmctldPidFile=$S/run/slurmctld.pid
SlurmdPidFile=$S/run/slurmd-%n.pid
SlurmctldLogFile=$S/log/slurmctld.log
SlurmdLogFile=$S/log/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
MailProg=$S/etc/mail
ReturnToService=1
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=3
MinJobAge=600
EnforcePartLimits=ALL
MaxArraySize=10001
MaxJobCount=20000
PropagateResourceLimits=NONE
ProctrackType=proctrack/$PROCTRACK
TaskPlugin=$TASK
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=500
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,bf_continue,nohold_on_prolog_fail,requeue_setup_env_fail
SlurmctldParameters=preempt_send_user_signal
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
GresTypes=gpu
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=2
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=$CTLADDR
AccountingStoragePort=$((PORT+19))
AccountingStoragePass=$S/munge/munge.socket.2
AccountingStorageTRES=gres/gpu$tres
AccountingStorageEnforce=associations,limits,qos$enforce
$rules
AccountingStoreFlags=job_comment,job_env,job_script
$nodelines$partlines
EOF
cat >"$S/env.sh" <<EOF
export SLURM_CONF=$S/etc/slurm.conf
EOF
export SLURM_CONF=$S/etc/slurm.conf
if [ "$MODE" = plain ] && [ ! -e /etc/slurm/slurm.conf ]; then mkdir -p /etc/slurm; ln -sfn "$S/etc/slurm.conf" /etc/slurm/slurm.conf; say "linked /etc/slurm/slurm.conf (down.sh removes it)"; fi
started=()

# ---------------------------------------------------------------- network namespaces (mode net)
if [ "$MODE" = net ]; then
  ip link show "$BR" >/dev/null 2>&1 || { ip link add "$BR" type bridge; ip addr add $NET.1/24 dev "$BR"; ip link set "$BR" up; }
  for n in "${names[@]}"; do
    ns=$BR-$n; ip netns list 2>/dev/null | grep -qw -- "$ns" && continue
    v=v$PORT$(( ${addr[$n]##*.} )); ip netns add "$ns"
    ip link add "$v" type veth peer name eth0 netns "$ns"; ip link set "$v" master "$BR" up
    ip -n "$ns" link set lo up; ip -n "$ns" addr add "${addr[$n]}/24" dev eth0; ip -n "$ns" link set eth0 up
  done
fi

# ---------------------------------------------------------------- daemons
if ! alive munged "$S/munge/munge.socket.2"; then
  rm -f "$S"/munge/munge.socket.2*
  munged --key-file="$S/etc/munge.key" --socket="$S/munge/munge.socket.2" --pid-file="$S/run/munged.pid" --log-file="$S/log/munged.log" --seed-file="$S/munge/seed" --num-threads=4 2>"$S/log/munged.out" || { cat "$S/log/munged.out" "$S/log/munged.log"; die munged; }
  started+=("munged:$(cat "$S/run/munged.pid")")
fi

if [ ! -d "$S/db/mysql" ]; then
  rm -rf "$S/db"; mkdir -p "$S/db"
  mariadb-install-db --no-defaults --datadir="$S/db" --user=root --auth-root-authentication-method=socket --skip-test-db --innodb-log-file-size=16M --innodb-buffer-pool-size=16M >"$S/log/db-install.log" 2>&1 || die "see $S/log/db-install.log"; say "database created"
fi
db_ok() { mariadb-admin --no-defaults -S "$S/run/db.sock" ping; }
if ! alive mariadbd "$S/etc/my.cnf"; then
  setsid mariadbd --defaults-file="$S/etc/my.cnf" </dev/null >"$S/log/mariadbd.out" 2>&1 &
  wait_for 600 db_ok || { tail -n 20 "$S/log/mariadbd.log"; die mariadbd; }
  started+=("mariadbd:$(cat "$S/run/mariadbd.pid")")
fi
mariadb --no-defaults -S "$S/run/db.sock" -e 'create database if not exists slurm_acct_db'
say "mariadbd ok"; if ! alive slurmdbd slurmdbd; then
  MYSQL_UNIX_PORT=$S/run/db.sock slurmdbd || { tail -n 20 "$S/log/slurmdbd.log"; die slurmdbd; }
  dbd_ok() { alive slurmdbd slurmdbd && (exec 3<>"/dev/tcp/$CTLADDR/$((PORT+19))"); }
  wait_for 600 dbd_ok || { tail -n 20 "$S/log/slurmdbd.log"; die slurmdbd; }
  started+=("slurmdbd:$(cat "$S/run/slurmdbd.pid")")
fi
# first start against an empty state: register the cluster and its TRES before slurmctld asks for them (else it exits)
if [ ! -e "$S/ctl/clustername" ]; then wait_for 200 sacctmgr -n show tres || die "slurmdbd does not answer"; fi
# Partitions name these QOS, so they exist before the controller starts; it makes the TRES of their limits.
[ "$STRICT" = yes ] && { sacctmgr -i add cluster dev; sacctmgr -i add qos gpu,needgpu; sacctmgr -i modify user root set qos+=gpu defaultqos=normal; } >/dev/null 2>&1 || true
say "slurmdbd ok"; if ! alive slurmctld slurmctld; then
  slurmctld 2>"$S/log/slurmctld.out" || { cat "$S/log/slurmctld.out"; tail -n 20 "$S/log/slurmctld.log"; die slurmctld; }
  wait_for 400 scontrol ping || { tail -n 20 "$S/log/slurmctld.log"; die slurmctld; }
  started+=("slurmctld:$(cat "$S/run/slurmctld.pid")")
fi
for n in "${names[@]}"; do
  alive "slurmd-$n" "slurmd -N $n" && continue
  mkdir -p "$S/spool/$n"
  enter=(); [ "$MODE" = net ] && enter=(nsenter "--net=/run/netns/$BR-$n")
  if [ "$MODE" = plain ]; then slurmd -N "$n"
  else "${enter[@]}" unshare -u -m sh -c 'hostname "$1" && mount --bind "$2/hosts" /etc/hosts && mkdir -p /etc/slurm && mount --bind "$2" /etc/slurm && exec slurmd -N "$1"' sh "$n" "$S/etc"; fi 2>"$S/log/slurmd-$n.out" || { cat "$S/log/slurmd-$n.out"; tail -n 20 "$S/log/slurmd-$n.log"; die "slurmd $n"; }
  started+=("slurmd-$n:")
done
say "daemons started"; nodes_ok() { [ "$(sinfo -h -N -o '%N %T' | sort -u | grep -c -E ' (idle|mixed|allocated|completing)$')" = ${#names[@]} ]; }
if ! wait_for 60 nodes_ok; then scontrol update nodename="$(IFS=,; echo "${names[*]}")" state=resume 2>/dev/null || true; wait_for 200 nodes_ok || { sinfo -N -l; die "nodes not up"; }; fi
if [ "$STRICT" = yes ]; then
  sacctmgr -i modify user root set qos+=gpu defaultqos=normal >/dev/null 2>&1 || true
  sacctmgr -i modify qos needgpu set MinTRESPerJob=gres/gpu=1 Flags=DenyOnLimit >/dev/null || die "no QOS needgpu"
fi
echo "$SIG" >"$S/run/sig"
say "nodes ready"; say "up: mode=$MODE, ${#names[@]} nodes, state in $S"
for s in "${started[@]}"; do d=${s%%:*}; printf '  started %-12s pid %s\n' "$d" "$(cat "$S/run/$d.pid")"; done
[ ${#started[@]} -gt 0 ] || echo "  (everything was already running)"
sinfo -o '%10P %6D %.14G %.8t %N'
echo "use it with:  . $S/env.sh"
