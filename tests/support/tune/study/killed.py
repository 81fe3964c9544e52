"""A program that runs the tiny study, for a test that kills it: `python -m tests.support.tune.study.killed FOLDER`."""

import sys

from braidax.tune.study import Place, StudyFolder, run_study
from tests.support.tune.study.tiny import ABOUT, CASE, DESIGN

if __name__ == "__main__":
    run_study(CASE, DESIGN, StudyFolder(sys.argv[1], ABOUT), place=Place(devices=2))
