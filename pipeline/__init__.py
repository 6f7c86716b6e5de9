"""From an experiment to its stages: graph, plan, run state, driver, pools, commands, report."""
