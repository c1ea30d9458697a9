"""A SLURM cluster of one node on the loopback address, with a GPU that is only a name.

Real daemons of Debian's slurm-wlm and munge, with configuration, sockets, ports and state in a
folder of their own. The node claims more cores and memory than there are, so that jobs of the study
fit. `lacks()` says why a machine cannot run it.
"""

import importlib.util
import os
import shutil
import signal
import socket
import stat
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "srun")
CORES, MEMORY_MB = 8, 64000
CONFIGURATION = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1
MinJobAge=300
KillWait=2
JobRequeue=0
MpiDefault=none
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory={memory} Gres=gpu:1 State=UNKNOWN
PartitionName=smoke Nodes={host} Default=YES State=UP
PartitionName=other Nodes={host} State=UP
"""


def lacks():
    """Why SLURM cannot be tried here; "" if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{missing[0]} is missing: apt-get install slurm-wlm munge"
    if importlib.util.find_spec("snakemake_executor_plugin_slurm") is None:
        return "snakemake-executor-plugin-slurm is missing: make cluster"
    return "" if os.geteuid() == 0 else "the daemons of SLURM need root"


class Cluster:
    """The running daemons; `variables` lead a command to them."""

    def __init__(self, folder):
        self.folder, self.host = Path(folder), socket.gethostname().partition(".")[0]
        self._daemons = []
        self.variables = {
            "SLURM_CONF": f"{folder}/slurm.conf",
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
        }

    def start(self):
        for name in ("munge", "state", "spool", "bin"):
            (self.folder / name).mkdir()
        key = self.folder / "munge/key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        device = self.folder / "nvidia0"
        # SLURM wants a device there; this one is that of /dev/null.
        os.mknod(device, stat.S_IFCHR | 0o666, os.stat(os.devnull).st_rdev)
        text = CONFIGURATION.format(
            host=self.host, folder=self.folder, ports=_ports(2), cores=CORES, memory=MEMORY_MB
        )
        (self.folder / "slurm.conf").write_text(text)
        gres = f"AutoDetect=off\nName=gpu File={device} Flags=nvidia_gpu_env\n"
        (self.folder / "gres.conf").write_text(gres)
        # Within a job the plugin forgets where the configuration is.
        wrapper = self.folder / "bin/srun"
        configuration = self.variables["SLURM_CONF"]
        wrapper.write_text(
            f'#!/bin/sh\nSLURM_CONF={configuration} exec {shutil.which("srun")} "$@"\n'
        )
        wrapper.chmod(0o755)
        munge = [f"--{name}={self.folder}/munge/{file}" for name, file in MUNGE.items()]
        self._daemon("munged", "--force", "--foreground", *munge)
        self._until(lambda: (self.folder / "munge/socket").exists(), "munged")
        self._daemon("slurmctld", "-D", "-c", "-f", configuration)
        self._daemon("slurmd", "-D", "-f", configuration)
        self._until(lambda: self.state() == "idle", "the node")
        return self

    def stop(self):
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def state(self):
        """The state of the node in SLURM's short words: idle, mix, drng, drain, down."""
        return self.ask("sinfo", "--noheader", "--Node", "--partition=smoke", "--format=%t")

    def update(self, state):
        """Set the node's state: drain, down, resume."""
        self.ask("scontrol", "update", f"nodename={self.host}", f"state={state}", "reason=test")

    def jobs(self, form="%T"):
        """A line for each job that SLURM remembers, the newest last."""
        words = ("--noheader", "--states=all", "--sort=i", f"--format={form}")
        return self.ask("squeue", *words).splitlines()

    def ask(self, *call):
        done = subprocess.run(
            call, env=os.environ | self.variables, capture_output=True, text=True, timeout=60
        )
        return done.stdout.strip()

    def _daemon(self, *call):
        with (self.folder / f"{call[0]}.out").open("w") as out:
            self._daemons.append(subprocess.Popen(call, stdout=out, stderr=out))

    def _until(self, there, name):
        last = time.monotonic() + 60
        while not there():
            if time.monotonic() > last:
                said = "".join(path.read_text() for path in self.folder.glob("*.out"))
                raise RuntimeError(f"{name} did not come up within 60 s: {said[-2000:]}")
            time.sleep(0.2)


MUNGE = {
    "key-file": "key",
    "socket": "socket",
    "pid-file": "pid",
    "log-file": "log",
    "seed-file": "seed",
}


def _ports(count):
    """Ports that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    found = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return found
