#!/bin/sh
# `gateway.sh serve` or `gateway.sh gateway`: joins the Ray cluster at OUTRIDER_RAY__ADDRESS (or KubeRay's RAY_ADDRESS) as a node
# that lends nothing, then becomes `outrider`.  Without an address outrider starts a Ray of its own, in this container.
set -eu
address="${OUTRIDER_RAY__ADDRESS:-${RAY_ADDRESS:-}}"
if [ -n "$address" ]; then
    ray start --address="$address" --num-cpus=0 --num-gpus=0 --object-store-memory=80000000 --disable-usage-stats
    export OUTRIDER_RAY__ADDRESS="$address"
fi
exec outrider "$@"
