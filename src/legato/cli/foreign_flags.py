"""Flags of vLLM and llama-server that Legato lacks, with notes on what to use instead."""

import itertools
import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

import msgspec

from legato.core.spelling import did_you_mean

_NOTES = {
    "it is --tensor-parallel-size": "tp",
    "a model is divided by --tensor-parallel-size alone; start several servers behind a balancer": (
        "pp dp pipeline-parallel-size *context-parallel-size "
        "data-parallel-* *expert-parallel* distributed-executor-backend nnodes node-rank "
        "master-addr master-port all2all-backend *eplb* *dbo* disable-custom-all-reduce "
        "disable-nccl-for-dp-synchronization headless num-redundant-experts "
        "expert-placement-strategy ray-workers-use-nsight worker-cls worker-extension-cls "
        "max-parallel-loading-workers aggregate-engine-logging enable-elastic-ep "
        "*cp-kv-cache-*"
    ),
    "adapters are not supported; merge one into its model, and serve that": (
        "*lora* *prompt-adapter*"
    ),
    "only text models are supported": (
        "*-mm-* mm-* limit-mm-per-prompt media-io-kwargs video-pruning-rate "
        "allowed-local-media-path allowed-media-domains *multimodal* language-model-only"
    ),
    "TLS is a reverse proxy's, such as nginx or Caddy": "ssl-* enable-ssl-refresh",
    "on a GPU, graphs are captured for fixed numbers of rows; a CPU has none": (
        "enforce-eager compilation-config *cuda*graph* max-seq-len-to-capture O optimization-level "
        "performance-mode"
    ),
    "a GPU runs Legato's own Triton kernels; --kernels says what computes the layers on a CPU": (
        "attention-backend disable-cascade-attn kernel-config attention-config enable-flashinfer-* "
        "moe-backend *-prefill-backend"
    ),
    "no request is ever logged; --trace FILE.jsonl records them, without their texts": (
        "disable-log-requests enable-log-requests enable-log-outputs max-log-len enable-log-deltas "
        "enable-logging-iteration-details log-error-stack"
    ),
    "it is --speculative, with auto, off or a number of tokens": (
        "speculative-config num-speculative-tokens num-lookahead-slots ngram-prompt-lookup-* "
        "speculative-draft-* speculative-max-* speculative-disable-* spec-decoding-* "
        "typical-acceptance-*"
    ),
    "calls and thoughts are read by what the checkpoint's chat template writes": (
        "enable-auto-tool-choice tool-call-parser tool-parser-plugin reasoning-parser "
        "reasoning-parser-plugin enable-reasoning exclude-tools-when-tool-choice-none "
        "chat-template-content-format"
    ),
    "that is always so": (
        "enable-request-id-headers enable-prompt-tokens-details "
        "use-v2-block-manager fail-on-environ-validation"
    ),
    "set HF_HOME, the Hugging Face hub's own variable": "download-dir",
    "set HF_TOKEN, the Hugging Face hub's own variable": "hf-token",
    "no code of a checkpoint is ever run; architectures that Legato knows are built in": (
        "trust-remote-code code-revision"
    ),
    "it is --kv-cache-memory": "kv-cache-memory-bytes num-gpu-blocks-override",
    "weights stay on one device; --quantization makes them smaller": "cpu-offload-* offload-*",
    "it is --log-level": "uvicorn-log-level log-config-file disable-uvicorn-access-log",
    "probes and /metrics are never logged; at --log-level warning, no access is": (
        "disable-access-log-for-endpoints"
    ),
    "it is --prefill-order, and a request's slo_class": "scheduling-policy",
    "chunks are as long as --itl-slo allows, or as --max-num-batched-tokens": (
        "long-prefill-token-threshold max-num-partial-prefills max-long-partial-prefills "
        "scheduler-delay-factor num-scheduler-steps multi-step-stream-outputs preemption-mode "
        "scheduler-cls disable-async-output-proc stream-interval"
    ),
    "it is --num-steps-in-flight": "async-scheduling",
    "it is --timeout-drain": "shutdown-timeout",
    "it is --max-header-size": "h11-max-*",
    "there is one HTTP process; texts are read by further ones already": (
        "asc api-server-count disable-frontend-multiprocessing tokenizer-pool-*"
    ),
    "requests say their own seed": "seed",
    "requests ask for ids by return_token_ids": "return-tokens-as-token-ids tokens-only",
    "prompts are texts, or token ids": "enable-prompt-embeds",
    "nothing is logged of it; /metrics and /dashboard show it": "disable-log-stats",
    "the largest is OpenAI's, 20": "max-logprobs",
    "log-probabilities are those before temperature and filters": "logprobs-mode",
    "grammars are llguidance's": "structured-outputs-config guided-decoding-*",
    "the checkpoint's own are used, and requests may say otherwise; --default-max-tokens and "
    "--max-output-tokens limit outputs": ("generation-config override-generation-config"),
    "the format is known by the files: safetensors beside config.json, or GGUF": (
        "config-format safetensors-load-strategy use-tqdm-on-load "
        "model-loader-extra-config ignore-patterns pt-load-map-location"
    ),
    "the checkpoint's config.json says it": (
        "hf-overrides hf-config-path rope-scaling rope-theta disable-sliding-window "
        "override-attention-dtype"
    ),
    "models generate text; there are no others": "task runner convert *pooler-config",
    "tokenizers are tokenizer.json, or a GGUF file's": (
        "tokenizer-mode tokenizer-revision skip-tokenizer-init"
    ),
    "the cache is a GPU's and the host's own; --swap-space is the latter": (
        "kv-offloading-* ec-transfer-config weight-transfer-config disable-hybrid-kv-cache-manager"
    ),
    "--kv-role says what an engine does for others, and what for itself": "kv-transfer-config",
    "they are --kv-events-endpoint, --kv-events-replay-endpoint and --kv-events-topic": (
        "kv-events-config"
    ),
    "blocks are found by their tokens; --enable-prefix-caching turns it on": (
        "prefix-caching-hash-algo"
    ),
    "--kv-cache-dtype int8 finds its scales by itself": "calculate-kv-scales",
    "--otlp-traces-endpoint and --trace record all there is": (
        "collect-detailed-traces enable-layerwise-nvtx-tracing profiler-config"
    ),
    "metrics are in docs/reference/metrics.md; --metrics-prefix vllm names them as vLLM does": (
        "show-hidden-metrics-for-version enable-server-load-tracking enable-mfu-metrics "
        "kv-cache-metrics*"
    ),
    "requests say chat_template_kwargs": "default-chat-template-kwargs",
    "--quantization takes none, gguf, int8, int4, w8a8, w4a8 and fp8": (
        "allow-deprecated-quantization"
    ),
    "listen on --host and --port": "uds",
    "a proxy that serves under a path strips it": "root-path",
    "there are no plugins": (
        "middleware logits-process* io-processor-plugin additional-config grpc tool-server"
    ),
    "CORS takes --allowed-origins alone": "allow-credentials allowed-methods allowed-headers",
    "clients ask for it by stream_options": "enable-force-include-usage",
    "/docs needs no internet, and says nothing secret": "disable-fastapi-docs enable-offline-docs",
    "the answering role is the assistant's": "response-role",
    "these models are not supported": "mamba-* kv-sharing-fast-prefill *-routed-experts",
    "start a server when it is wanted; it loads in seconds": "enable-sleep-mode",
}
"""Key the note, value names of vLLM's flags with spaces between; * stands for anything."""

_LLAMA_NOTES = {
    "it is the first argument, or --model": "m hf hfr hf-repo hf-file hff model-url mu",
    "it is --max-model-len": "c ctx-size ctx",
    "it is --num-threads": "t threads",
    "prompts and decodes have the same threads, --num-threads": "tb threads-batch",
    "it is --max-num-seqs": "np parallel",
    "it is --max-num-batched-tokens": "b batch-size ub ubatch-size",
    "it is --served-model-name": "a alias",
    "it is --speculative-model": "md model-draft spec-draft-model",
    "it is --speculative": "draft draft-max draft-n draft-min draft-n-min draft-p-min spec-type",
    "it is --kv-cache-dtype int8, for keys and values": "ctk cache-type-k ctv cache-type-v",
    "the whole model is on one device, a GPU if there is one: see --device": (
        "ngl gpu-layers n-gpu-layers main-gpu mg split-mode sm tensor-split ts cmoe cpu-moe ncmoe "
        "n-cpu-moe ot override-tensor nkvo kv-offload op-offload fit fitt fit-ctx"
    ),
    "it is --timeout-drain for the server's end; clients say how long they wait": "to timeout",
    "that is always so": (
        "jinja fa flash-attn cb cont-batching metrics props slots cache-prompt cache-reuse "
        "embedding embeddings reranking rerank kvu kv-unified swa-full warmup check-tensors"
    ),
    "it is --chat-template, which takes files as well": "chat-template-file",
    "a request says it, and generation_config.json or the GGUF file what requests begin with": (
        "n predict n-predict temp temperature top-k top-p min-p s repeat-penalty "
        "repeat-last-n presence-penalty frequency-penalty samplers mirostat* grammar grammar-file "
        "j json-schema ignore-eos keep chat-template-kwargs"
    ),
    "thoughts are read by what the checkpoint's chat template writes": (
        "reasoning-format rea reasoning"
    ),
    "the model's description says it": "rope-freq-* yarn-* override-kv context-shift grp-attn-*",
    "memory is the system's to keep; nothing is mapped once the model is loaded": (
        "mlock mmap numa no-host repack dio direct-io"
    ),
    "only text models are supported": "mm mmproj mmproj-url",
    "it is --log-level": "v verbose lv verbosity log-verbosity log-disable log-file log-timestamps",
    "the server's page is at /, and a reverse proxy serves others": "path api-prefix webui",
}
"""The same of llama-server's flags, the short ones with one dash included."""

_FOREIGN_VALUES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "half": "float16",
    "f32": "float32",
    "float": "float32",
    "fp32": "float32",
    "gpu": "cuda",
    "q8_0": "int8",
    "warn": "warning",
}
"""Key a value that other servers' flags take, value what it is called here."""
_FLAG = re.compile("--|-[A-Za-z]")  # no lone dash, and no negative number
_DASHES = "-\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}"


class _SpeculativeConfig(msgspec.Struct):
    """The fields of --speculative-config to read; without a method, a model is a draft model."""

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None


def foreign_flag_note(option: str, value: str = "") -> str | None:
    """Return a note on a flag that another server has and Legato lacks; None for other flags.

    Args:
        value: the flag's value, if known.
    """
    if option == "--speculative-config" and value:
        try:
            return _speculative_note(msgspec.json.decode(value, type=_SpeculativeConfig))
        except msgspec.DecodeError:
            pass
    # vLLM also takes parts of a JSON value as --flag.key.
    whole = option.lstrip("-").partition(".")[0]
    names = {whole, whole.removeprefix("no-")}
    for note, patterns in itertools.chain(_NOTES.items(), _LLAMA_NOTES.items()):
        if any(fnmatchcase(name, pattern) for pattern in patterns.split() for name in names):
            return note
    return None


def _speculative_note(asked: _SpeculativeConfig) -> str:
    count = asked.num_speculative_tokens or "auto"
    if asked.method == "ngram" or asked.model == "[ngram]":
        return f"it is --speculative {count}"
    if asked.method == "suffix":
        return "it is --speculative auto"
    if asked.model is not None and asked.method in (None, "draft_model"):
        return f"it is --speculative-model {asked.model} --speculative {count}"
    return (
        f"drafts by {asked.method} are not supported; --speculative looks them up in what was "
        "there before, and with --speculative-model a smaller model makes them"
    )


def unknown_flag(option: str, known: Iterable[str], value: str = "") -> str:
    """Return the error for an unknown flag, with suggestions."""
    known, name = list(known), option.lstrip(_DASHES)
    if f"--{name}" in known:
        return f"there is no flag {option}; did you mean --{name}?"
    note = foreign_flag_note(option, value)
    # Without the dashes, which all flags have in common.
    names = (other.removeprefix("--") for other in known)
    return f"there is no flag {option}{f': {note}' if note else did_you_mean(name, names)}"


def is_flag(text: str, before: str) -> bool:
    """Return whether an argument is meant as a flag; an editor may have joined its hyphens.

    Args:
        before: the argument before it, whose value it may be.
    """
    if text.startswith("-"):
        return _FLAG.match(text) is not None
    return text.startswith(tuple(_DASHES)) and not before.startswith("-")


def known_value(value: str, known: Collection[str]) -> str:
    """Return a hint at the known value that is meant; empty if none is."""
    meant = _FOREIGN_VALUES.get(value.lower())
    return f"; did you mean {meant}?" if meant in known else did_you_mean(value, known)
