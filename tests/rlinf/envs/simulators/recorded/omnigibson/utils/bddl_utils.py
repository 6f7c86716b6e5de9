"""Names of activities."""

BEHAVIOR_ACTIVITIES = ["picking_up_trash", "turning_on_radio"]
