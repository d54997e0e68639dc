//! With feature `cpu`: compiles the kernels' source as C++ for the CPU. Otherwise does nothing, and
//! needs no compiler.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=cuda");
    #[cfg(feature = "cpu")]
    compile();
}

#[cfg(feature = "cpu")]
fn compile() {
    let result = cc::Build::new()
        .cpp(true)
        .cpp_link_stdlib(None)
        .std("c++17")
        .opt_level(2)
        .debug(false)
        .flag("-ffp-contract=off")
        .flag("-fno-exceptions")
        .flag("-fno-rtti")
        .flag("-fno-strict-aliasing")
        .flag("-fvisibility=hidden")
        .file("cuda/host_launch.cpp")
        .try_compile("kvtide_cpu");
    if let Err(error) = result {
        println!(
            "cargo::error=feature `cpu` of kvtide-kernels compiles cuda/kvtide.cu for the CPU and \
             needs a C++17 compiler: install g++ or clang++, or name one in CXX ({error})"
        );
    }
}
