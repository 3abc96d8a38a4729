"""Generate on the simulated device, and print how often the host waits for it in one generation step, as JSON.

Usage: PYTHONPATH=tests:tests/gpu python tests/gpu/generation_records.py CASE ...
"""

import json
import sys
from collections import Counter

import simulated_device as gpu  # before torch
import torch
from zoo import CASES, Case, make_batch

from hf_ctxmodels.core.host_copies import CollatedBatch

STEPS = (4, 5)


def waits_per_step(case: Case, num_beams: int) -> Counter[str]:
    """Waits of the fifth step: the difference between generating five and four tokens."""
    counts = []
    for steps in STEPS:
        model = case.model().eval()
        names = ("input_ids", "attention_mask")
        batch = {name: tensor for name, tensor in make_batch(case, (6, 6)).items() if name in names}
        with gpu.simulated_device():
            gpu.to_device(model)
            with gpu.recording() as record:
                model.generate(
                    **CollatedBatch(batch).to("cuda"),
                    num_beams=num_beams,
                    do_sample=False,
                    min_new_tokens=steps,
                    max_new_tokens=steps,
                )
        counts.append(Counter(record.waits))
    return counts[1] - counts[0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in CASES:
        if str(case) in sys.argv[1:]:
            for num_beams in (1, 4):
                record = {"case": str(case), "num_beams": num_beams, "waits": waits_per_step(case, num_beams)}
                print(json.dumps(record), flush=True)
