"""From an experiment to its stages: flow, plan, run state, driver, report."""
