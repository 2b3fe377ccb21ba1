"""The main function of a test's drafter process.  Tests only."""

import signal
import time
from multiprocessing.connection import Connection
from typing import Any

STAND_STILL = "stand still"


def main(job: dict[str, Any], pipe: Connection) -> None:
    """Runs one `DrafterProcess` until the pipe closes; answers each message with its `Learning` counters.

    An empty message only asks for them.  Any other stops the trainer; a head's directory also publishes that head.
    """
    from backend.config import DraftingSettings
    from backend.drafter.process import DrafterModel, DrafterProcess
    from backend.learning.trainer import News

    paths = job["paths"]
    model = DrafterModel(paths.target_dir, job["own"] or paths.drafter_dir, paths.drafter_dir, paths.learning_dir)
    drafter = DrafterProcess("drafter-0", model, DraftingSettings.model_validate(job["settings"]), job["address"])
    drafter.start()
    pipe.send(drafter.address)
    try:
        while True:
            if message := pipe.recv():
                learner, learning = drafter._learner, drafter.stats().learning
                assert learner is not None
                assert learning is not None
                while learner._trainer is None:
                    time.sleep(0.01)
                learner._trainer.send_signal(signal.SIGSTOP)
                if message != STAND_STILL:
                    learner._news.put(
                        News(learning.steps, learning.training_s, learning.owed, learning.loss, published=message)
                    )
            pipe.send(drafter.stats().learning)
    except EOFError:
        drafter.stop()
