"""Answers of Slurm for clusters made up in tests and benchmarks."""

from __future__ import annotations

from slurm.discovery import SlurmOutput

KINDS = (
    ("gpu:a100:4(S:0-1)", "a100", 4, "ib,milan"),
    ("gpu:h100:8(S:0-1)", "h100", 8, "ib,genoa"),
    ("gpu:nvidia_a40:2", "nvidia_a40", 2, "milan"),
    ("(null)", "", 0, "milan"),
)


def large_cluster(nodes: int, jobs: int = 2000) -> SlurmOutput:
    """A cluster of ``nodes`` of four kinds, each in its kind's partition, ``all`` and ``spot``."""
    sinfo, usage, members = [], [], [0] * len(KINDS)
    for i in range(nodes):
        which = i % len(KINDS)
        gres, kind, count, features = KINDS[which]
        members[which] += 1
        state = ("idle", "mixed", "allocated", "draining")[i // len(KINDS) % 4]
        used = {"mixed": count // 2, "allocated": count}.get(state, 0)
        for partition in (f"p{which}", "all", "spot"):
            sinfo.append(f"n{i:05}|{partition}|{state}|64|512000|{gres}|{features},rack{i // 40}")
        name = f"gpu:{kind}:{used}(IDX:0-{used})" if kind else "gpu:0"
        usage.append(
            f"NodeName=n{i:05} Arch=x86_64 CoresPerSocket=32  CPUAlloc=0 CPUEfctv=64 CPUTot=64 "
            f"AvailableFeatures={features} ActiveFeatures={features} Gres={gres} GresDrain=N/A "
            f"GresUsed={name} NodeAddr=n{i:05} NodeHostName=n{i:05} Version=23.11.4 "
            "OS=Linux 5.14.0-362.el9 #1 SMP PREEMPT_DYNAMIC RealMemory=512000 AllocMem=0 "
            f"FreeMem=500000 State={state.upper()} ThreadsPerCore=1 Partitions=p{which},all,spot  "
            f"CfgTRES=cpu=64,mem=500G,billing=64,gres/gpu={count} AllocTRES=cpu=1,gres/gpu={used} "
            "CapWatts=n/a CurrentWatts=0 AveWatts=0 Comment=gpu=1 GresUsed=gpu:none:9"
        )
    names = [*(f"p{which}" for which in range(len(KINDS))), "all", "spot"]
    partitions = [
        f"PartitionName={name} AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=NO QoS=N/A "
        f"MaxNodes=UNLIMITED MaxTime=2-00:00:00 PriorityTier={1 if name == 'spot' else 10} "
        f"OverSubscribe=NO PreemptMode={'REQUEUE' if name == 'spot' else 'OFF'} State=UP"
        for name in names
    ]
    pending = [
        f"{names[i % len(names)]:<200}{2:<12}{'cpu=8,mem=1G,node=2,gres/gpu=8':<250}"
        f"{'gres/gpu:4':<100}{'Priority':<60}"
        for i in range(jobs)
    ]
    return SlurmOutput(
        "23.11.4",
        *("\n".join(lines) + "\n" for lines in (sinfo, partitions, usage, pending)),
        qos="normal|0|||||||\n",
        associations="big|team||normal||||||\n",
    )
