"""The workload: a transformer language model, trained by any variant, marked with ranges.

python -m ddp_prof.train --world-size 2 --variant bucketed --bucket-size-mb 25 --model-size mini
torchrun --nproc-per-node 2 -m ddp_prof.train --variant overlap --model-size xl --batch-size 4 --seq-len 128
"""
