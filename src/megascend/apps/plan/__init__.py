"""Plan a run before anybody rents the cluster: time of a step by formula, search over layouts, efficiency of devices."""
