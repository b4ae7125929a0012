"""Behaviour of Lightning, for docs/comparison.md: in an environment with lightning."""

import tempfile
from pathlib import Path

import lightning
import torch
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, Dataset

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
QUIET |= {"accelerator": "cpu", "enable_model_summary": False}


class Ragged(Dataset):
    """Rows with one to six targets."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        targets = torch.full((6,), -100)
        targets[: index % 6 + 1] = torch.randint(0, 4, (index % 6 + 1,), generator=generator)
        return torch.randn(8, generator=generator), targets


class Model(lightning.LightningModule):
    def __init__(self, batch_size=8):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.linear, self.batch_size, self.seen = torch.nn.Linear(8, 24), batch_size, []

    def training_step(self, batch, _):
        inputs, targets = batch
        self.seen.append(round(float(inputs[0, 0]), 3))
        return torch.nn.functional.cross_entropy(self.linear(inputs).view(-1, 4), targets.view(-1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return DataLoader(Ragged(), batch_size=self.batch_size)

    def flat(self):
        return torch.cat([weight.detach().flatten() for weight in self.parameters()])


def train(rows, accumulation, steps=1, checkpoint=None):
    model = Model(rows)
    trainer = lightning.Trainer(max_steps=steps, accumulate_grad_batches=accumulation, **QUIET)
    trainer.fit(model, ckpt_path=checkpoint)
    return model, trainer


try:
    lightning.Trainer(max_step=3)
except TypeError as error:
    print("misspelt: refused:", error)
whole = train(8, 1)[0].flat()
for rows in (4, 2):
    print(f"{rows}x{8 // rows}: differs by {(train(rows, 8 // rows)[0].flat() - whole).abs().max():.1e}")
print(f"the update itself: {(whole - Model().flat()).abs().max():.1e}")
place = Path(tempfile.mkdtemp()) / "step4.ckpt"
train(8, 1, 4)[1].save_checkpoint(place)
print("steps 5 and 6 of a whole run:", train(8, 1, 6)[0].seen[4:])
print("steps 5 and 6 of a resumed run:", train(8, 1, 6, place)[0].seen)
print("resumed with half the batch: steps", train(4, 1, 8, place)[1].global_step)
trainer = lightning.Trainer(max_steps=2, accumulate_grad_batches=4, **QUIET)
found = Tuner(trainer).scale_batch_size(Model(2), max_trials=2, mode="power")
print("the batch finder makes 2 x 4", found, "x", trainer.accumulate_grad_batches)
