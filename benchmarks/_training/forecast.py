"""What `hpctk advise` says of a set-up, from a calibration of its links that is kept with the results.

A result keeps what was measured; what is predicted of it is worked out anew whenever a report is made, so that it is
today's advisor that is judged. Results from before calibrations were kept have what was predicted on their day.
"""

from __future__ import annotations

import json
from statistics import median

from hpctk.advise.local_work import from_calibration
from hpctk.advise.predict import fastest, predict
from hpctk.advise.question import Question
from hpctk.advise.recommend import recommend
from hpctk.collectives.tuning.calibration import Calibration

from . import contenders

#: Periods and densities that contenders have.
PERIODS, DENSITIES = (16,), (0.01, 0.1)


def foretell(document):
    """Write predictions and advice into a result that has a calibration, and the step alone. In place."""
    alone = [run["step_s"] for run in document["runs"] if run["method"] == "alone"]
    if "calibration" not in document or not alone:
        return
    text = json.dumps(document["calibration"])
    settings = document["settings"]
    question = Question(
        document["params"], median(alone), settings["hosts"], -(-settings["hosts"] // settings["nodes"]),
        "sgd" if settings["metric"] == "accuracy" else "adam",
        # The cores that compute also move the bytes: nothing hides.
        overlap_share=0.0, periods=PERIODS, densities=DENSITIES,
    )  # fmt: skip
    priced = predict(question, Calibration.from_json(text), from_calibration(text))
    by_way = {entry.name: entry for entry in fastest(priced)}
    advised = recommend(priced)
    document["advice"] = {
        "name": next((n for n in contenders.NAMES if contenders.way_of(n) == advised.choice.name), None),
        "way": advised.choice.name,
        "verdict": advised.verdict,
    }
    document["predictions"] = []
    for row in document["summary"]:
        found = by_way.get(contenders.way_of(row["name"]))
        if found is not None:
            document["predictions"].append({
                "name": row["name"],
                "measured_s": row["seconds"],
                "predicted_s": found.seconds,
                "ratio": found.seconds / row["seconds"],
            })  # fmt: skip
