"""The chapters of the book and the steps of its ladder, in order. Texts, tables and charts take the title of
a step from here."""

from attnlib.bench import names

STEPS: list[tuple[str, str]] = [
    ("01_naive", "Naive attention"),
    ("02_tiling", "Tiling"),
    ("03_online_softmax", "Online softmax"),
    ("04_exp2", "exp2"),
    ("05_two_pass_causal", "Two-pass causal"),
    ("06_autotuning", "Autotuning"),
    ("08_production", "Production kernel"),
    ("10_tma_wgmma", "TMA and wgmma"),
    ("11_warp_specialization", "Warp specialization"),
    ("12_overlap", "Overlap"),
    ("13_scheduling", "Scheduling"),
    ("14_ring", "The ring and the shift"),
    ("15_teaching", "The teaching kernel"),
]
"""(notebook name, title) of each step, in the order in which the book takes them. Chapters are numbered by
decades, one a part, so that a part can grow: numbers have gaps."""

GLUON_FROM = 10
"""The first chapter number whose step is written in Gluon, for Hopper."""

CHAPTERS: list[tuple[str, str]] = sorted([
    *STEPS,
    ("00_how_we_measure", "How we measure"),
    ("07_descriptors_and_late_tile", "Descriptors and the late tile"),
    ("19_record", "The record"),
    ("20_backward", "The backward pass"),
    ("21_hopper_backward", "The backward pass on Hopper"),
    ("22_fp8", "FP8"),
    ("23_decoding", "Decoding"),
    ("30_block_masks", "Block masks"),
    ("31_bsfa", "Block-Sparse FlashAttention"),
    ("32_seer", "SeerAttention"),
    ("33_s2", "S2-Attention"),
    ("34_entmax", "Entmax"),
    ("35_monarch", "MonarchAttention"),
    ("36_distr", "DistrAttention"),
    ("37_exponentials", "Exponentials"),
    ("40_fastattention", "FastAttention's ideas"),
    ("41_finetuning", "Memory and time of fine-tuning"),
    ("42_context_parallel", "One sequence on several GPUs"),
])  # fmt: skip
"""All chapters, by their numbers: the steps, and those that have no kernel in the ladder, though their own
may stand on the way to one."""

_TITLES = dict(CHAPTERS)


def label(impl: str) -> str:
    """The reader's name of an implementation, with the title of a step: "03 Online softmax", "cuDNN"."""
    if impl.endswith(names.CONTROL):
        return label(impl.removesuffix(names.CONTROL)) + names.CONTROL
    return f"{impl[:2]} {_TITLES[impl]}" if impl in _TITLES else names.label(impl)
