"""What a text model is asked to compute with attnlib, and the verdict: equal to "eager", refused by name, or
wrong."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from tiny import NARROW, WIDE, Architecture, build, has_window
from transformers import AttentionInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import attnlib.hf

LENGTH, SHORT = 17, 7
Results = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """compute: (model, device, whether it is the truth) -> what is compared. roles: what models it is for.
    window: whether it is about a window that is shorter than the text. tokens: what is compared has to be
    identical. alone: the same of each packed sequence by itself."""

    name: str
    compute: Callable
    roles: tuple[str, ...] = ("decoder", "encoder-decoder", "encoder")
    window: bool = False
    tokens: bool = False
    alone: Callable | None = None

    def applies(self, architecture: Architecture) -> bool:
        if architecture.role not in self.roles or (self.window and not has_window(architecture)):
            return False
        parameters = inspect.signature(architecture.model_class.forward).parameters
        needs = getattr(self.compute, "needs", None)
        return needs is None or needs in parameters or architecture.role == "encoder-decoder"


def ids(device, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (2, length), generator=generator).to(device)


def padding(side: str, device, length: int = LENGTH) -> torch.Tensor:
    """attention_mask, (2, length) of 0 and 1."""
    mask = torch.ones(2, length, dtype=torch.long, device=device)
    if side == "left":
        mask[1, :6] = 0
    elif side == "right":
        mask[1, -6:] = 0
    elif side == "holes":
        mask[0, 6:9] = 0
    return mask


def takes(model, name: str) -> bool:
    """Whether the model's forward pass has such an argument."""
    return name in inspect.signature(model.forward).parameters


def inputs_of(model, device, decoder_length: int = SHORT, **inputs) -> dict:
    """What a call of the model is given: its text, and its decoder's where it has both."""
    inputs.setdefault("input_ids", ids(device))
    if takes(model, "decoder_input_ids"):
        inputs["decoder_input_ids"] = ids(device, decoder_length, seed=1)
    return inputs


def result_of(output) -> torch.Tensor:
    """The logits, (B, S, V); an encoder's last hidden state."""
    return output.logits if "logits" in output else output[0]


def logits(model, device, *length, **inputs) -> torch.Tensor:
    return result_of(model(**inputs_of(model, device, *length, **inputs)))


def real(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What is at tokens that are no padding; all of a decoder's, whose padded tokens are its encoder's."""
    return values[mask.bool()] if values.shape[1] == mask.shape[1] else values


# ---------------------------------------------------------------- cases


def plain(model, device, truth) -> Results:
    return {"logits": logits(model, device)}


def padded(side: str):
    def compute(model, device, truth) -> Results:
        mask = padding(side, device)
        return {"logits": real(logits(model, device, attention_mask=mask), mask)}

    return compute


def positions(device) -> torch.Tensor:
    """Two sequences in each row, cut at different places."""
    rows = [torch.cat([torch.arange(n), torch.arange(LENGTH - n)]) for n in (7, 4)]
    return torch.stack(rows).to(device)


def sequences_alone(model, device, truth) -> Results:
    """What `packed` would give if each sequence of a row were a call of its own."""
    rows = []
    for row, place in zip(ids(device), positions(device), strict=True):
        cut = int((place == 0).nonzero()[1])
        parts = []
        for part in (row[:cut], row[cut:]):
            place = torch.arange(len(part), device=device)[
                None
            ]  # some models count from elsewhere on their own
            parts.append(result_of(model(input_ids=part[None], position_ids=place, use_cache=False)))
        rows.append(torch.cat(parts, 1))
    return {"logits": torch.cat(rows)}


def packed(cache: bool):
    def compute(model, device, truth) -> Results:
        # With a cache "eager" takes a row for one sequence: the truth is what it says without.
        inputs = {"position_ids": positions(device), "use_cache": cache and not truth}
        return {"logits": logits(model, device, **inputs)}

    compute.needs = "position_ids"
    return compute


def cross_attention(model, device, truth) -> Results:
    """An encoder's text of 17 tokens with padding, for fewer queries and for more of them."""
    mask, results = padding("right", device), {}
    for length in (SHORT, LENGTH + 4):
        inputs = {"attention_mask": mask}
        if not takes(model, "decoder_input_ids"):
            generator = torch.Generator().manual_seed(5)
            states = torch.randn(2, LENGTH, model.config.hidden_size, generator=generator)
            states = states.to(device, model.dtype)
            inputs = {"input_ids": ids(device, length), "encoder_hidden_states": states}
            inputs["encoder_attention_mask"] = mask
        results[f"{length} queries"] = logits(model, device, length, **inputs)
    return results


cross_attention.needs = "encoder_hidden_states"


def cache(model, device, truth) -> Results:
    """A cache that is filled in parts."""
    past, found = None, []
    for part in ids(device).split((9, 6, 1, 1), 1):
        output = model(input_ids=part, past_key_values=past, use_cache=True)
        past = output.past_key_values
        found.append(output.logits)
    return {"logits": torch.cat(found, 1)}


def generated(beams: int):
    def compute(model, device, truth) -> Results:
        start = {"decoder_start_token_id": 1} if takes(model, "decoder_input_ids") else {}
        tokens = model.generate(
            ids(device), **start, attention_mask=padding("left", device), max_new_tokens=4, do_sample=False,
            num_beams=beams, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        return {"tokens": tokens}

    return compute


def gradients(model, device, truth) -> Results:
    with torch.enable_grad():
        mask = padding("right", device)
        real(logits(model, device, attention_mask=mask), mask).square().mean().backward()
    found = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return found


def compiled(side: str | None):
    def compute(model, device, truth) -> Results:
        mask = {} if side is None else {"attention_mask": padding(side, device)}
        if takes(model, "use_cache"):
            mask["use_cache"] = False
        torch._dynamo.reset()
        call = model if truth else torch.compile(model, fullgraph=True, backend="eager")
        found = result_of(call(**inputs_of(model, device, **mask)))
        return {"logits": found if side is None else real(found, mask["attention_mask"])}

    return compute


_TEXT, _GENERATES = ("decoder",), ("decoder", "encoder-decoder")
CASES = [
    Case("no padding", plain),
    Case("left padding", padded("left")),
    Case("right padding", padded("right")),
    Case("holes", padded("holes")),
    Case("packed", packed(cache=False), _TEXT, alone=sequences_alone),
    Case("packed, with a cache", packed(cache=True), _TEXT, alone=sequences_alone),
    Case("cross-attention, padded", cross_attention, _GENERATES),
    Case("window", plain, window=True),
    Case("window, left padding", padded("left"), window=True),
    Case("window, holes", padded("holes"), window=True),
    Case("window, packed", packed(cache=False), _TEXT, window=True, alone=sequences_alone),
    Case("window, cache", cache, _TEXT, window=True),
    Case("cache", cache, _TEXT),
    Case("greedy", generated(1), _GENERATES, tokens=True),
    Case("beams", generated(3), _GENERATES, tokens=True),
    Case("gradients", gradients),
    Case("compiled", compiled(None)),
    Case("compiled, left padding", compiled("left")),
]


# ---------------------------------------------------------------- the verdict

EQUAL, NOT_FOR_IT = "equal", "–"
ALONE, ONE = "equal to each sequence alone", "one sequence, as eager"
"""Of packed rows that "eager" takes for one sequence, because the model does not hand position_ids to its
mask, or there is a cache. attnlib computes them as they are if the model's attention gets position_ids."""

REFUSED, WRONG, ELSE = "refused: ", "WRONG: ", "not in transformers: "


@lru_cache(8)
def _built(*arguments):
    """The models of one architecture, which its cases share."""
    return build(*arguments)


DISAGREEMENT = 1e-3
"""Relative errors beyond any that rounding makes in these models."""


def verdict(architecture: Architecture, case: Case, device: str = "cpu") -> str:
    """EQUAL: within the error budget of what transformers computes in float64, or the same tokens. ALONE or
    ONE: see there. REFUSED and the name of the argument. ELSE and why, if "eager" or "sdpa" can't do it too.
    WRONG and how, otherwise."""
    if not case.applies(architecture):
        return NOT_FOR_IT

    def run(
        implementation: str, dtype: torch.dtype = torch.float32, truth: bool = True, compute=case.compute
    ) -> Results:
        window = NARROW if case.window else WIDE
        crossing = case.compute is cross_attention
        model = _built(architecture, implementation, window, device, dtype, crossing)
        with torch.no_grad():
            return compute(model, device, truth)

    other = "sdpa" if architecture.claims_sdpa else "eager"
    try:
        eager = truth = run("eager")
        if not case.tokens:
            # "eager" computes the softmax in float32 whatever its inputs are: the truth is that of "sdpa",
            # where the model has it, and where they do not agree, "eager" alone counts.
            truth = run(other, torch.float64)
            budget = 2 * max(_error(eager, truth), _error(run(other), truth))
            if not budget <= DISAGREEMENT:
                truth, budget = eager, DISAGREEMENT
    except Exception as error:
        return ELSE + _short(error)
    calls = _Counting()
    try:
        with calls:
            found = run(attnlib.hf.NAME, truth=False)
    except Exception as error:
        name = _named(error)
        if name is not None:
            return REFUSED + name
        try:
            run(other, truth=False)
        except Exception as error_of_sdpa:
            return ELSE + _short(error_of_sdpa)
        return WRONG + _short(error)
    if not calls.number:
        return WRONG + "attnlib was not called"
    if case.tokens:
        return EQUAL if torch.equal(found["tokens"], truth["tokens"]) else WRONG + "other tokens"
    budget += 16 * torch.finfo(torch.float32).eps
    error = _error(found, truth)
    if error <= budget:
        return EQUAL
    if case.alone is not None:
        if _error(found, run(other, torch.float64, compute=case.alone)) <= budget:
            return ALONE
        if _error(found, run("eager", truth=False)) <= budget:
            return ONE
    return WRONG + f"error {error:.0e}, budget {budget:.0e}"


def _error(found: Results, truth: Results) -> float:
    """The largest error of any part, relative to the largest value of that part. A part that is 0 but for
    rounding, as the gradient of a key's bias, is measured by the others."""
    if found.keys() != truth.keys() or any(found[name].shape != x.shape for name, x in truth.items()):
        return float("inf")
    sizes = {name: float(x.abs().max()) for name, x in truth.items() if x.numel()}
    least = 1e-2 * max(sizes.values())
    errors = (
        float((found[name].double() - truth[name]).abs().max()) / max(size, least)
        for name, size in sizes.items()
    )
    return max(errors, key=lambda error: (error != error, error))  # NaN is the largest


class _Counting:
    """Counts the calls of attnlib's attention while it is open."""

    def __enter__(self):
        self.number = 0

        def counted(*args, **kwargs):
            self.number += 1
            return attnlib.hf.attention_forward(*args, **kwargs)

        AttentionInterface.register(attnlib.hf.NAME, counted)
        return self

    def __exit__(self, *_):
        attnlib.hf.register()


_ARGUMENT = re.compile(r"\b(\w+): expected ")


def _named(error: Exception) -> str | None:
    """The argument that an error of attnlib names. Dynamo repeats the error that ends a trace, and what fails
    when a graph runs is a RuntimeError."""
    if isinstance(error, ValueError | torch._dynamo.exc.TorchDynamoException):
        found = _ARGUMENT.search(str(error))
    else:
        found = _ARGUMENT.match(str(error)) if isinstance(error, RuntimeError) else None
    return found and found[1]


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:90]}"


def refusal(architecture: Architecture) -> str:
    """The verdict for an architecture that attnlib does not take."""
    config = CONFIG_MAPPING[architecture.model_type]()
    config._attn_implementation = attnlib.hf.NAME
    try:
        with torch.device("meta"):
            architecture.model_class(config)
    except ValueError as error:
        by_name = _named(error) and architecture.class_name in str(error)
        return REFUSED + architecture.class_name if by_name else WRONG + _short(error)
    return WRONG + "not refused"
