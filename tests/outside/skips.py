"""Why tests of transformers' ModelTesterMixin are skipped for the Skyformer models: one line for each reason."""

from __future__ import annotations

import re

JUSTIFIED = {
    r"requires (accelerator|CUDA|MPS|multiple accelerators)": "needs a GPU or several; this machine has none",
    r"requires (Flash Attention|the kernels library)": "needs flash attention kernels, which run on GPUs only",
    r"requires deepspeed": "needs DeepSpeed and a GPU",
    r"requires (ExecuTorch|ONNXScript)": "needs ExecuTorch or ONNX; `tests/hf/test_export.py` exports every attention",
    r"support RoPE scaling": "by definition: positions are learned, so there is no rotary scaling",
    r"does not support grouped_mm": "by definition: the models have no experts",
    r"No conversion found": "by definition: no older names of weights exist that would have to be converted",
    r"not (a )?composite|No subconfigs|does not support SDPA": "by definition: the models have one part, not several",
    r"No sequence-to-sequence": "by definition: the models are encoders",
    r"_keep_in_fp32_modules": "by definition: no module has to stay in float32",
    r"sliding window": "by definition: the models have no windows",
    r"TP plan": "transformers' tensor parallelism is not offered; `skyformer.distributed` divides the sequence instead",
}
"""By a pattern of the message with which the test is skipped."""


def justification(message: str) -> str | None:
    """The reason for a skip with this message; None if nobody has given one."""
    return next((reason for pattern, reason in JUSTIFIED.items() if re.search(pattern, message)), None)
