#!/bin/bash
# TPU VMs: TPU=my-slice ZONE=us-central2-b launch/tpu-vm.sh laptop --mesh data=32 --run first
#
# Not run on a cluster yet: linted, and its inner part started by a test with a stand-in for gcloud.
#
# gcloud runs one command on every VM of the slice. Each VM asks its metadata server which worker it
# is and where the others are. The folder that --out names has to be one that all VMs share. With the
# same --run the run goes on where it ended.

set -euo pipefail
: "${TPU:?the name of the TPU slice}" "${ZONE:?its zone}"

# What every VM does. The endpoints are a list of addresses, or of name:id:address. Each line that
# a VM prints gets its number in front; launch/panes.sh shows them apart.
on_each_vm=$(cat <<'VM'
set -euo pipefail
metadata() {
  curl -fsS -H 'Metadata-Flavor: Google' \
    "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}
IFS=, read -ra workers <<< "$(metadata worker-network-endpoints)"
export MESHBOOK_COORDINATOR="${workers[0]##*:}:8476"
export MESHBOOK_PROCESSES="${#workers[@]}"
MESHBOOK_PROCESS="$(metadata agent-worker-number)"
export MESHBOOK_PROCESS
cd mesh-book
exec .venv/bin/python train.py "$@" > >(
  stdbuf -oL tr '\r' '\n' | sed -u "s/^/[$MESHBOOK_PROCESS] /") 2>&1
VM
)

# Each word of the command line is quoted for the shell of the VM.
gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all \
  --command="bash -c $(printf '%q' "$on_each_vm") train $(printf '%q ' "$@")"
