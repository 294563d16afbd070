"""What a type checker has to find in a user's program; each line that ends in "wrong" is one mistake."""

from __future__ import annotations

import torch

import gpusync

gpusync.pull("local", "base", "source", "7")  # wrong
print(gpusync.pull("local", "base", "source", 7).to_versoin)  # wrong
gpusync.open_chain("source")  # wrong
gpusync.apply_to_model(torch.nn.Module(), "source")  # wrong
gpusync.apply_to_model(torch.nn.Module(), gpusync.open_chain("s", 1), write_back="later")  # wrong
gpusync.prepare(torch.nn.Module(), gpusync.open_chain("s", 1)).comit()  # wrong
gpusync.Publisher("source").publish([])  # wrong
gpusync.SourceNotReadyError("text", tensor=3)  # wrong
print(gpusync.no_such_name)  # wrong
