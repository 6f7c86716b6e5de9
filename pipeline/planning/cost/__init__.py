"""The cost model: times of stages from measurements and from data sheets."""
