"""A step's program without a model: what comes next is a function of all tokens before it.

It reads them where a model would find them: in the cache, through the block table, by positions.
What an executor does wrong shows in the tokens, and a thousand steps take no longer than one of the
kernels' in the interpreter.
"""

import zlib
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from legato.executor.sampler import NO_TOKEN
from legato.gpu.decoder import GpuDecoder
from legato.gpu.kernels.sampling import FAULTY, GREEDY, NOTHING
from legato.gpu.step_inputs import LoadedStep, StepInputs, StepSize
from legato.gpu.step_program import StepProgram
from tests.gpu.host_twin import HostTwin
from tests.model.random_models import decoder_spec

VOCAB_SIZE = 40
SPEC = decoder_spec(
    vocab_size=VOCAB_SIZE, hidden_size=1, intermediate_size=1, num_heads=1,
    num_kv_heads=1, head_dim=2, sliding_windows=(None,),
)  # fmt: skip


class TokenProgram(StepProgram):
    """Attributes:
    pads: whether steps are larger than they need be.
    num_runs: steps so far.
    faults: key the number of one, value what it raises, or None where its logits are not finite.
    """

    def __init__(
        self,
        device: HostTwin,
        *,
        block_size: int,
        num_blocks: int,
        num_slots: int,
        max_len: int,
        pads: bool = False,
    ) -> None:
        # What was never written is no token.
        blocks = torch.full((1, 2, num_blocks, block_size * SPEC.head_dim), torch.nan)
        model = GpuDecoder(SPEC, dtype=torch.float32, device=device.torch_device)
        super().__init__(
            model,
            (model.cache.whole,),
            [blocks],
            device,
            block_size=block_size,
            num_slots=num_slots,
            max_blocks=-(-max_len // block_size),
            max_rows=256,
            max_samples=32,
        )
        self.pads = pads
        self._twin = device
        self.num_runs = 0
        self.faults: dict[int, Exception | None] = {}
        self._cache = blocks[0, 0].view(-1, SPEC.head_dim)[:, 0].numpy()

    def size(self, num_rows: int, num_samples: int, *, has_chunks: bool) -> StepSize:
        if self.pads:
            num_rows, num_samples = num_rows + 5, num_samples + 2
        return super().size(num_rows, num_samples, has_chunks=has_chunks)

    def forward(self, step: LoadedStep) -> None:
        self._twin.enqueue(partial(self._forward, self.inputs(step.size)))

    def _forward(self, inputs: StepInputs) -> None:
        tokens = inputs.input_source.numpy().copy()
        unknown = tokens < 0
        tokens[unknown] = self.last_token.numpy()[-1 - tokens[unknown]]
        places = inputs.groups[0].slot_mapping.numpy()
        self._cache[places[places >= 0]] = tokens[places >= 0]
        context: dict[int, tuple[int, ...]] = {}
        for work in inputs.groups[0].work:
            for slot, first_row, num_rows, position, *_ in work.items[: work.counts[0]].tolist():
                for row in range(num_rows):
                    context[first_row + row] = self._read(slot, position + row + 1)
        for sample, row in enumerate(inputs.sample_rows.tolist()):
            self.logits[sample] = torch.from_numpy(logits_after(context.get(row, ())))
        self.num_runs += 1
        error = self.faults.get(self.num_runs)
        if error is not None:
            raise error

    def sample(self, size: StepSize, *, adjusted: torch.Tensor | None = None) -> None:
        self._twin.enqueue(partial(self._sample, size.num_samples, self.inputs(size), adjusted))

    def _sample(self, count: int, inputs: StepInputs, adjusted: torch.Tensor | None) -> None:
        kinds, points = inputs.sampling.kinds.tolist(), inputs.sampling.uniforms.tolist()
        logits = (self.logits if adjusted is None else adjusted).numpy()
        for row in range(count):
            if kinds[row] == NOTHING:
                continue
            shift = 0 if kinds[row] == GREEDY else int(points[row] * VOCAB_SIZE)
            token = (int(np.roll(logits[row], shift).argmax()) - shift) % VOCAB_SIZE
            if logits[row].max() == -np.inf:
                token = NO_TOKEN
            if self.num_runs in self.faults:
                token = FAULTY
            self.sampled[row] = token
            self.last_token[inputs.sample_slots[row]] = max(token, 0)

    def _read(self, slot: int, count: int) -> tuple[int, ...]:
        positions = np.arange(count)
        blocks = self.block_table[0, slot].numpy()[positions // self.block_size]
        tokens = self._cache[blocks * self.block_size + positions % self.block_size]
        return tuple(-1 if token != token else int(token) for token in tokens.tolist())


def logits_after(tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """float32 [VOCAB_SIZE]; no two tokens are as likely."""
    seed = zlib.crc32(np.array(tokens, dtype=np.int32).tobytes())
    return np.random.default_rng(seed).permutation(VOCAB_SIZE).astype(np.float32)


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    """What follows a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_after(tokens).argmax()))
    return tokens[len(prompt) :]
