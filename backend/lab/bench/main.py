"""`outrider bench`: reads its options and measures.  Parent process."""

from collections.abc import Sequence
from pathlib import Path

from backend.config import environment
from backend.config.sources import CommandError, Say
from backend.lab.bench import options as options_module
from backend.lab.bench.children import ChildError
from backend.lab.bench.plan import split_cores
from backend.models.head_config import CheckpointError
from backend.models.resolve import ModelError

RESULTS = Path("benchmarks") / "results"


def main(arguments: Sequence[str], say: Say) -> None:
    """Runs one benchmark; `say` gets lines of progress.  Raises `CommandError`."""
    options = options_module.parse(arguments)
    split = split_cores()
    # Imported here, because importing vLLM's codec and torch takes seconds, and `--help` should be immediate.
    environment.export({"VLLM_LOGGING_LEVEL": "ERROR"}, override=False)
    from backend.engine.client import EngineRefused
    from backend.lab.bench import hardware
    from backend.lab.bench.load import LoadError
    from backend.lab.bench.measure import Results
    from backend.lab.bench.run import run

    if options.pace and hardware.gpus():
        raise CommandError("--pace is for a CPU; on a GPU steps take what they take")
    about = hardware.about(["outrider", "bench", *arguments], split.all)
    output = options.output or RESULTS / f"{about['date'][:10]}-{about['commit'].rstrip('+')}"
    output.mkdir(parents=True, exist_ok=True)
    try:
        run(Results(about, options, split), output, say)
    except (ChildError, CheckpointError, EngineRefused, LoadError, ModelError, TimeoutError, OSError) as error:
        raise CommandError(str(error)) from error
