raise RuntimeError("broken while importing")
