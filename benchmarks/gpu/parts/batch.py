"""A batch as fast as it goes, as `LLM.generate` has it: without a promise."""

from benchmarks.gpu.parts import streams

TITLE = "A batch"

run = streams.run_batch
