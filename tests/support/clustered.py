"""soak.py's tiny run as one process of several: `python clustered.py FOLDER STEPS [OPTIONS]`.

OPTIONS is JSON: mesh, every, strike {"process", "step", "signal", "marker"}: one process is sent
the signal after that step, unless the marker is there already; pace: seconds of each step.
"""
import json
import os
import pathlib
import sys
import time

import jax
import soak

from meshbook.hosts.places import connect


def main(folder, steps, options):
    strike, pace = options.pop("strike", None), options.pop("pace", 0)

    def after(step):
        time.sleep(pace)
        if strike and (jax.process_index(), step) == (strike["process"], strike["step"]):
            marker = pathlib.Path(strike["marker"])
            if not marker.exists():
                marker.touch()
                os.kill(os.getpid(), strike["signal"])

    connect(60)
    soak.train(folder, steps, after=after, **options)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]) if sys.argv[3:] else {})
