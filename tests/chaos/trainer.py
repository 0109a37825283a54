"""`skirl train` whose steps take a while without computing, so that faults hit a job in the middle."""

import os
import sys
import time

from torch.optim.optimizer import register_optimizer_step_post_hook

from skirl.cli import main

if __name__ == "__main__":
    register_optimizer_step_post_hook(lambda *_: time.sleep(float(os.environ["CHAOS_PAUSE"])))
    sys.exit(main(["train", *sys.argv[1:]]))
