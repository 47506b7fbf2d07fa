#!/bin/bash
# A SLURM cluster of two nodes, "one" and "two", in the directory $1: munged, slurmctld and two slurmd, in namespaces of
# their own (see test_slurm.py), whose end is theirs. `ready` appears there once it takes jobs.
cd "$1" || exit
ip link set lo up
ip link add e0 type veth peer name e1
ip addr add 10.77.1.1/24 dev e0 && ip addr add 10.77.1.2/24 dev e0 # loopback addresses are none to SLURM
ip link set e0 up && ip link set e1 up
printf '127.0.0.1 localhost %s\n10.77.1.1 one\n10.77.1.2 two\n' "$(hostname)" >hosts
mount --bind hosts /etc/hosts
mkdir -m 755 state one two
head -c 1024 /dev/urandom >key && chmod 400 key
cat >slurm.conf <<C
ClusterName=test
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket=$1/munge,cred_expire=5
StateSaveLocation=$1/state
SlurmdSpoolDir=$1/%n
SlurmctldPidFile=$1/ctld.pid
SlurmdPidFile=$1/%n.pid
SlurmctldLogFile=$1/ctld.log
SlurmdLogFile=$1/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MailProg=/bin/true
SlurmdParameters=config_overrides
NodeName=one NodeHostname=$(hostname) NodeAddr=10.77.1.1 Port=17011
NodeName=two NodeHostname=$(hostname) NodeAddr=10.77.1.2 Port=17012
PartitionName=all Nodes=ALL Default=YES
C
export SLURM_CONF=$1/slurm.conf
munged --foreground --force --key-file=key --socket="$1/munge" --log-file="$1/munge.log" --pid-file="$1/munge.pid" \
    --seed-file="$1/seed" >munged.out 2>&1 &
until [ -S munge ]; do sleep 0.1; done
slurmctld -D >ctld.out 2>&1 &
slurmd -D -N one >one.out 2>&1 &
slurmd -D -N two >two.out 2>&1 &
until sinfo -h -o %T 2>/dev/null | grep -qx idle; do sleep 0.1; done
touch ready
wait
