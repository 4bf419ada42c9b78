"""The contestant of a cell in PyTorch, compiled: the same shapes, autocast where it is bfloat16."""

import sys
import time

import torch

from benchmarks import torch_gpt, torch_vit
from benchmarks.accelerator_cells import Cell
from benchmarks.accelerator_worker import Timer, answer, contest

RATE = 1e-3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def prepare(cell):
    """Build the model and compile it by two steps: {name: (Timer, facts)}."""
    torch._dynamo.reset()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    timer = Timer(steps(cell), wait)
    begin = time.perf_counter()
    timer.wait(timer.call())
    timer.wait(timer.call())
    passed = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None
    return {"PyTorch compiled": (timer, {"compile seconds": passed, "peak bytes": peak})}


def steps(cell):
    """A function that sends off one training step."""
    kind = torch_vit.ViT if cell.model == "vit" else torch_gpt.MiniGPT
    model = kind(cell.config).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), RATE, fused=DEVICE == "cuda")
    inputs, labels = (torch.from_numpy(x[0].copy()).to(DEVICE) for x in cell.batches().values())
    inputs, labels = inputs if cell.model == "vit" else inputs.long(), labels.long().flatten()
    half = cell.dtype == "bfloat16"

    @torch.compile
    def loss_of(inputs, labels):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=half):
            logits = model(inputs)
            return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels)

    def call():
        optimizer.zero_grad()
        loss = loss_of(inputs, labels)
        loss.backward()
        optimizer.step()
        return loss

    return call


def wait(loss):
    """Until the device is done."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return loss.item()


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")  # TF32, as JAX does by default
    answer(sys.argv[1], contest(lambda cell: prepare(Cell(**cell))))
