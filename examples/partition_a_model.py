"""A model in pipeline stages, by a dynamic program and at random."""

import moemesh as mm

task = {"model": "tiny", "cluster": "laptop_cpu", "seq_len": 128, "global_batch": 8}
for method in ("dp", "random"):
    found = mm.partition(**task, method=method, stages=2, evaluations=100)
    layers = [(stage.layers[0], stage.layers[-1]) for stage in found.stages]
    print(f"{method}: layers {layers}, {found.seconds:.3f} s a step")
