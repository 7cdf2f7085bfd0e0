"""Reports: plain data in, something to read out. Only here are numbers rounded and given units."""
