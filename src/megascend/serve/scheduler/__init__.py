"""From a request to the ranks and back: its turn (`turns`), its way (`inbox`), its run (`lines`), its answer (`futures`)."""
