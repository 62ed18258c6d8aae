import statistics
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnlib import attention, dispatch
from attnlib.kernels.hopper import launch_backward as LB
from attnlib.kernels.portable import launch_backward as PB
from attnlib.params import band

dev='cuda'
CALLS=[('B1 S777 H48 D128 dense',1,48,777,128,False),('B2 S2048 H16 D128 causal',2,16,2048,128,True),('B3 S1777 H20 D64 causal',3,20,1777,64,True),('B1 S300 H24 D128 causal',1,24,300,128,True)]
def loop(fn,n=300,reps=7):
    for _ in range(30): fn()
    torch.cuda.synchronize(); out=[]
    for _ in range(reps):
        t=time.perf_counter()
        for _ in range(n): fn()
        torch.cuda.synchronize(); out.append((time.perf_counter()-t)/n*1e6)
    return f"{min(out):.0f} {statistics.median(out):.0f} {max(out):.0f}"
def host(fn,n=60,reps=9):
    for _ in range(10): fn()
    out=[]
    for _ in range(reps):
        torch.cuda.synchronize(); t=time.perf_counter()
        for _ in range(n): fn()
        out.append((time.perf_counter()-t)/n*1e6); torch.cuda.synchronize()
    return f"{min(out):.1f} {statistics.median(out):.1f}"
print(torch.get_num_threads(), torch.__version__)
class Nop(torch.autograd.Function):
    @staticmethod
    def forward(q,k,v,z): return torch.empty_like(q), torch.empty(1,device=dev)
    @staticmethod
    def setup_context(ctx,i,o):
        ctx.save_for_backward(*i[:3],*o); ctx.mark_non_differentiable(o[1])
    @staticmethod
    def backward(ctx,d,_):
        a=ctx.saved_tensors
        return a[0],a[1],a[2],None
for name,B,H,S,D,c in CALLS:
    q,k,v=(torch.randn(B,H,S,D,device=dev,dtype=torch.bfloat16,requires_grad=True) for _ in range(3))
    out,lse=attention(q,k,v,causal=c,return_lse=True); do=torch.randn_like(out)
    g=lambda: torch.autograd.grad(out,(q,k,v),do,retain_graph=True)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]): oc=F.scaled_dot_product_attention(q,k,v,is_causal=c)
    gc=lambda: torch.autograd.grad(oc,(q,k,v),do,retain_graph=True)
    qd,kd,vd,od,ld=(x.detach() for x in (q,k,v,out,lse))
    raw=lambda: dispatch.backward(do,qd,kd,vd,od,ld,band(c,None),D**-.5)
    # kernels alone: graph
    gr=torch.cuda.CUDAGraph()
    with torch.cuda.graph(gr):
        for _ in range(10): raw()
    for _ in range(3): gr.replay()
    torch.cuda.synchronize(); t=time.perf_counter()
    for _ in range(20): gr.replay()
    torch.cuda.synchronize(); kern=(time.perf_counter()-t)/200*1e6
    on=Nop.apply(q,k,v,None)[0]
    gn=lambda: torch.autograd.grad(on,(q,k,v),do,retain_graph=True)
    print(name,'| kernels',f'{kern:.0f}','| autograd ours',loop(g),'| cudnn',loop(gc),'| dispatch.backward loop',loop(raw),'host',host(raw),'| nop function',loop(gn),flush=True)
    with torch.autograd.set_multithreading_enabled(False):
        print('   single thread: ours',loop(g),'cudnn',loop(gc),'nop',loop(gn),flush=True)
# pieces, last call
import cProfile
import pstats

p=cProfile.Profile()
for _ in range(20): raw()
torch.cuda.synchronize()
p.enable()
for _ in range(300): raw()
p.disable(); torch.cuda.synchronize()
pstats.Stats(p).sort_stats('tottime').print_stats(18)
print('empty_strided',host(lambda: torch.empty_strided(q.shape,q.stride(),dtype=q.dtype,device=q.device),1000))
print('empty 1d',host(lambda: torch.empty(1000000,dtype=torch.float32,device=q.device),1000))
print('cur stream',host(lambda: torch._C._cuda_getCurrentRawStream(0),1000),'current_device',host(lambda: torch.cuda.current_device(),1000),'deterministic',host(torch.are_deterministic_algorithms_enabled,1000))
import triton

fill=triton.runtime.driver.active.utils.fill_tma_descriptor
(L,plan)=next(iter(LB._compiled.values())) if isinstance(next(iter(LB._compiled.values())),tuple) else [x for x in LB._compiled.values() if isinstance(x,tuple)][0]
md=L.compiled.metadata.tensordesc_meta
print(md[0])
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

d=md[0]; form=(d["swizzle"],d["elem_size"],TMA_DTYPE_DEVICE_TO_HOST[d["elem_type"]],d["block_size"])
sh=tuple(q.shape); st=tuple(q.stride())
print('fill_tma',host(lambda: fill(q.data_ptr(),*form,sh,st,0),1000))
print('prepare hit',host(lambda: LB._prepare(q.shape,k.shape,(do.stride(),q.stride(),k.stride(),v.stride(),out.stride()),q.dtype,0,band(True,None),D**-.5,None,None),1000))
print('choose',host(lambda: dispatch.choose_backward(qd,kd,vd,None,None,False),1000))
call=LB._prepare(q.shape,k.shape,(do.stride(),q.stride(),k.stride(),v.stride(),out.stride()),q.dtype,0,band(True,None),D**-.5,None,None)
rows=torch.empty(call.rows_shape,dtype=torch.float32,device=dev); sums=torch.empty(call.sums,dtype=torch.float32,device=dev)
at=call.layouts
print('rows launch',host(lambda: PB.run(call.rows_launch,0,(od,do),(at.out,at.d_out),(ld,rows,sums,None)),200))
# 12-layer step
import torch.nn as nn


class Layer(nn.Module):
    def __init__(s,d,h,att): super().__init__(); s.n1=nn.LayerNorm(d); s.qkv=nn.Linear(d,3*d,bias=False); s.o=nn.Linear(d,d,bias=False); s.n2=nn.LayerNorm(d); s.f=nn.Sequential(nn.Linear(d,4*d),nn.GELU(),nn.Linear(4*d,d)); s.h=h; s.att=att
    def forward(s,x):
        b,t,d=x.shape; q,k,v=(y.view(b,t,s.h,-1).transpose(1,2) for y in s.qkv(s.n1(x)).chunk(3,-1))
        x=x+s.o(s.att(q,k,v).transpose(1,2).reshape(b,t,d)); return x+s.f(s.n2(x))
def sd(q,k,v): return F.scaled_dot_product_attention(q,k,v,is_causal=True)
def ours(q,k,v): return attention(q,k,v,causal=True)
for b in (1,4):
  for nm,att in (('sdpa',sd),('ours',ours),('sdpa2',sd),('ours2',ours)):
    torch.manual_seed(0); net=nn.Sequential(*[Layer(768,12,att) for _ in range(12)]).to(dev,torch.bfloat16)
    x=torch.randn(b,1024,768,device=dev,dtype=torch.bfloat16)
    def step():
        net(x).float().pow(2).mean().backward()
    print('12 layers, B',b,nm,loop(step,20,7),flush=True)
