"""The one settings object: frozen, typed, composed of a section per part.  Pure data, in any process.

Every key is a command-line flag, an environment variable and a YAML key: `verifier.max_num_seqs` is `--verifier-max-num-seqs`,
`OUTRIDER_VERIFIER__MAX_NUM_SEQS` and `verifier: {max_num_seqs: ...}`.  `sources.py` merges them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

Affinity = Literal["none", "session", "prefix", "both"]
Mode = Literal["off", "native", "sync", "ahead", "auto"]
REMOTE_MODES: frozenset[Mode] = frozenset({"sync", "ahead", "auto"})
"""Modes that draft in drafter processes."""
MAX_NUM_BATCHED_TOKENS = 2048
"""Largest number of tokens in one step, unless `verifier.engine_args` sets another."""


class Section(BaseModel):
    """A part of the settings; unknown keys are errors, and so is infinity, which JSON cannot hold."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def check_resources(resources: dict[str, float]) -> dict[str, float]:
    """Refuses amounts that are not positive, and resources that have a setting of their own."""
    for name, amount in resources.items():
        if name in ("CPU", "GPU", "memory", "object_store_memory"):
            raise ValueError(f"{name} is no resource of one's own (there are the settings `cores` and `gpus`)")
        if amount <= 0:
            raise ValueError(f"{name} must be more than 0")
    return resources


Resources = Annotated[dict[str, float], AfterValidator(check_resources)]
Folder = Annotated[str | None, AfterValidator(lambda value: str(Path(value).expanduser().absolute()) if value else None)]
"""A path, made absolute because verifiers and drafters run in directories of their own."""
File = Annotated[str | None, AfterValidator(lambda value: str(Path(value).expanduser()) if value else None)]


class GatewaySettings(Section):
    """The HTTP server, and how it chooses a verifier for each request."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    api_key: str | None = Field(
        None, description="bearer key that clients must send, or @FILE that holds it; none: open to all"
    )
    admin_key: str | None = Field(
        None, description="bearer key for /admin, where the fleet is changed, or @FILE with it; none: only from its own machine"
    )
    keys_file: File = Field(
        None, description="YAML file of hashed keys, with models, limits, weights and rights of each (see docs/operate/keys.md)"
    )
    cors_origins: list[str] = Field(
        default_factory=list, description="web pages that may call, as https://host, with commas; *: all; none: no CORS"
    )
    tls_cert: File = Field(None, description="certificate chain (PEM file): HTTPS is served")
    tls_key: File = Field(None, description="its private key (PEM file); default: in tls_cert")
    processes: int = Field(
        1, ge=1, le=64, description="gateway processes that share the port; max_in_flight and queues are of each of them"
    )
    served_model_name: list[str] = Field(
        default_factory=list,
        description="model names in the API, with commas; answers carry the first; default: the model's own name",
    )
    max_in_flight: int = Field(
        1024,
        ge=1,
        description="requests served at once, waiting ones included; more are answered 429 with Retry-After. As many sequences "
        "may wait for room at a verifier; more: 503",
    )
    queue_wait_s: float = Field(
        60.0,
        ge=0,
        description="seconds that a request waits at most: for room (one that would wait longer: 503 at once), or for another "
        "verifier where its own was lost",
    )
    drain_s: float = Field(
        30.0,
        ge=0,
        description="seconds that open requests may go on after SIGINT or SIGTERM, and at a verifier before they are moved "
        "elsewhere when it is removed or restarted",
    )
    state_dir: str = Field(
        "auto",
        description="folder of what is kept (responses, conversations, files, batches); auto: the user's state folder; none: "
        "nothing is kept",
    )
    state_mib: int = Field(
        2048,
        ge=1,
        description="MiB kept there: an eighth for responses and conversations (the oldest go first), the rest for files, the "
        "outputs of batches included (while they are full: 413)",
    )
    tool_call_parser: str = Field(
        "auto", description="vLLM's tool call parser; auto: by the model's family; none: tools are refused"
    )
    chat_template: str | None = Field(None, description="chat template file or text; default: the model's own")
    affinity: Affinity = Field(
        "none",
        description="rather than the verifier with the fewest tokens in flight, prefer the one that served the same session "
        "(header x-session-id, else `user`), the same beginning of a prompt, or both",
    )

    @property
    def responses_bytes(self) -> int:
        """Bytes of responses and conversations kept."""
        return (self.state_mib << 20) // 8

    @property
    def files_bytes(self) -> int:
        """Bytes of files kept."""
        return (self.state_mib << 20) - self.responses_bytes

    @field_validator("cors_origins", "served_model_name", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        """Flags and variables hold the list as one text, separated by commas or as JSON."""
        if not isinstance(value, str):
            return value
        return json.loads(value) if value.startswith("[") else [each.strip() for each in value.split(",") if each.strip()]

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: list[str]) -> list[str]:
        for each in value:
            scheme, separator, host = each.partition("://")
            if each != "*" and (scheme not in ("http", "https") or not separator or not host or "/" in host):
                raise ValueError("expected origins such as https://example.org, without a path, or *")
        return value


_OWN_SETTINGS = {
    "max_num_seqs": "verifier.max_num_seqs",
    "model": "model",
    "tensor_parallel_size": "verifier.tensor_parallel",
}


class VerifierSettings(Section):
    """A verifier replica: vLLM and the way it waits for drafts."""

    tensor_parallel: int = Field(
        1, ge=1, description="processes that share one verifier's model, on one node: a GPU each, or on a CPU its cores"
    )
    cores: int = Field(1, ge=1, description="CPU cores per verifier where it runs on the CPU, at least one per rank")
    ray_resources: Resources = Field(
        default_factory=dict, description="further Ray resources that a verifier takes: puts verifiers on nodes that have them"
    )
    max_num_seqs: int = Field(64, ge=1, description="requests in one step at most")
    lookup: bool = Field(
        True,
        description="remote modes: the verifier also looks drafts up in each request's own text and in others' outputs; they "
        "compete with the drafters' in every step",
    )
    reasoning_parser: str = Field(
        "auto", description="vLLM's reasoning parser; auto: by the model's family; none: reasoning stays text"
    )
    adapters: dict[str, str] = Field(
        default_factory=dict, description="LoRA adapters: the names clients use, and their directories"
    )
    adapters_loadable: bool = Field(
        False, description="further adapters may be loaded and unloaded over HTTP (/v1/load_lora_adapter), by administrators"
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="further vLLM engine arguments, by their names, as max_model_len; of a dictionary what differs",
    )

    @field_validator("engine_args")
    @classmethod
    def _not_settings(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Refuses arguments that have settings of their own: launcher and gateways go by these."""
        for argument, setting in _OWN_SETTINGS.items():
            if argument in value:
                raise ValueError(f"{argument} is the setting {setting}")
        return value


class DraftingSettings(Section):
    """A drafter process."""

    gpus: float | None = Field(
        None, ge=0, description="GPUs per drafter, a part of one or a whole number; default: 1 with CUDA, else 0"
    )
    cores: int = Field(1, ge=1, description="CPU cores per drafter where it runs on the CPU")
    ray_resources: Resources = Field(default_factory=dict, description="as verifier.ray_resources, of a drafter")
    cache_tokens: int = Field(131072, ge=256, description="rows of the drafter's KV cache, over all sequences")
    cuda_graphs: bool = Field(
        True, description="on a GPU, a head's or draft model's steps are captured as CUDA graphs at the start"
    )
    learning: Literal["off", "on", "always"] = Field(
        "off",
        description="a given head learns from live traffic: on, once few of its drafts are accepted, or fewer than at first; "
        "always, from the start (`--drafter grow` always does)",
    )
    learning_dir: Folder = Field(
        None, description="folder of heads that were learned, one per drafter; default: in the user's state folder, by model"
    )

    @field_validator("gpus")
    @classmethod
    def _part_or_whole(cls, value: float | None) -> float | None:
        """Refuses what Ray would refuse when the drafter starts."""
        if value is not None and value > 1 and value % 1:
            raise ValueError("beyond 1 it must be whole")
        return value


class TransportSettings(Section):
    """The data plane: ipc within a Ray node, tcp with CURVE between nodes."""

    host: str | None = Field(
        None, description="address or network interface that tcp sockets bind to; default: the node's own Ray address"
    )
    ports: str | None = Field(
        None, description="tcp ports of verifiers and drafters, as FIRST-LAST, for firewalls; default: any free one"
    )

    @field_validator("host")
    @classmethod
    def _one_address(cls, value: str | None) -> str | None:
        """Refuses wildcards: peers connect to this address, and the data plane must not be open to every network."""
        if value in ("0.0.0.0", "::", "[::]", "*"):
            raise ValueError("expected one address or interface, not all of them")
        return value

    @field_validator("ports")
    @classmethod
    def _range(cls, value: str | None) -> str | None:
        if value is None:
            return None
        first, separator, last = value.partition("-")
        if not (separator and first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 65536):
            raise ValueError("expected FIRST-LAST, two ports in ascending order")
        return value


class RecordsSettings(Section):
    """Records that verifiers write while they serve."""

    dir: Folder = Field(
        None, description="directory for records of steps, verifications, requests and decisions (parquet); default: none"
    )
    max_mib: int = Field(1024, ge=1, description="MiB of records kept per verifier; the oldest files are deleted")


class TracingSettings(Section):
    """OpenTelemetry traces; needs the extra `tracing`."""

    endpoint: str | None = Field(None, description="OTLP/HTTP collector, such as http://127.0.0.1:4318; none: no tracing")

    @field_validator("endpoint")
    @classmethod
    def _traces_url(cls, value: str | None) -> str | None:
        """Appends `/v1/traces` to a URL without a path."""
        if value is None:
            return None
        scheme, separator, rest = value.partition("://")
        if scheme not in ("http", "https") or not separator or not rest.strip("/"):
            raise ValueError("expected the http:// or https:// URL of an OTLP/HTTP collector")
        return value if "/" in rest.rstrip("/") else f"{value.rstrip('/')}/v1/traces"


class RaySettings(Section):
    """Ray, the control plane."""

    address: str | None = Field(None, description="a running Ray cluster; default: a local one, started and stopped with us")
    namespace: str = Field("outrider", description="Ray namespace: two fleets on one cluster need two")
    placement: Literal["spread", "near", "free"] = Field(
        "spread",
        description="members of a joined cluster. spread: over as many nodes as there are; near: each verifier on one node "
        "with its share of the drafters; free: as Ray likes",
    )


class Settings(Section):
    """All settings of `outrider serve`."""

    model: str = Field("demo", description="target model: Hugging Face id, directory, or the built-in `demo`")
    drafter: str = Field(
        "demo",
        description="EAGLE, DFlash or DSpark head, or a smaller model with a similar tokenizer: Hugging Face id, directory, or "
        "`demo`; `ngram` (no weights); `grow`, a head that begins as the target's last layer and learns from live traffic; "
        "several, with commas between them, go to the drafters in turn",
    )
    mode: Mode = Field(
        "auto",
        description="off: plain decoding; native: vLLM's co-located drafting; sync: remote drafters, draft then verify; "
        "ahead: the drafter drafts likely outcomes while the verifier works; auto: plain steps, sync or ahead, chosen step by "
        "step",
    )
    num_speculative_tokens: int = Field(
        8, ge=1, le=32, description="the longest draft (K); how much of a draft is verified is decided in every step"
    )
    verifiers: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        1, description="verifier replicas; auto: as many as the devices hold, less one for drafters"
    )
    drafters: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        1, description="drafters; auto: on the devices that verifiers leave"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="our own log level")
    log_format: Literal["text", "json"] = Field(
        "text", description="of gateways', verifiers' and drafters' logs: lines of text, or JSON objects"
    )
    gateway: GatewaySettings = Field(default_factory=GatewaySettings)
    verifier: VerifierSettings = Field(default_factory=VerifierSettings)
    drafting: DraftingSettings = Field(default_factory=DraftingSettings)
    transport: TransportSettings = Field(default_factory=TransportSettings)
    records: RecordsSettings = Field(default_factory=RecordsSettings)
    tracing: TracingSettings = Field(default_factory=TracingSettings)
    ray: RaySettings = Field(default_factory=RaySettings)

    @field_validator("mode", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        """YAML reads a bare `off` as false."""
        return "off" if value is False else value
