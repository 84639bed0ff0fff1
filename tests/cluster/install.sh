#!/bin/sh
# Installs what `make test-cluster` needs besides Python: Slurm, munge, ip, tc, unshare and nsenter.
PATH="$PATH:/usr/sbin:/sbin"
missing=""
for program in slurmctld slurmd munged srun ip tc unshare nsenter; do
  command -v "$program" > /dev/null || missing="$missing $program"
done
[ -z "$missing" ] && exit 0
if ! command -v apt-get > /dev/null; then
  echo "make test-cluster needs$missing, and there is no apt-get here to install them; install Slurm, munge, iproute2 and" \
    "util-linux in this system's way, and run it again" >&2
  exit 2
fi
if [ "$(id -u)" != 0 ]; then
  echo "make test-cluster needs$missing, and only root can install them: sudo make test-cluster" >&2
  exit 2
fi
apt-get update --quiet && DEBIAN_FRONTEND=noninteractive apt-get install --quiet --yes --no-install-recommends \
  slurm-wlm munge iproute2 util-linux
