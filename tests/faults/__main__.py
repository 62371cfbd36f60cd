import sys,tempfile,time
from pathlib import Path
from tests.faults.campaign import *
if __name__=="__main__":
    a,b=map(int,sys.argv[1].split(":")); t=time.monotonic(); import collections; c=collections.Counter()
    with tempfile.TemporaryDirectory() as d:
        for seed,v in run_all(range(a,b),Path(d)):
            c[v.outcome]+=1
            print(f"{'ok ' if v.is_good else 'BAD'} {seed} {v.case}: {v.outcome.value} {v.seconds:.2f}",flush=True)
            if not v.is_good: print(v.words,flush=True)
    print({k.value:n for k,n in c.items()},time.monotonic()-t)
