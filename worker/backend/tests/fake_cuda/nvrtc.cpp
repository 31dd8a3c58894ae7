// A libnvrtc.so.12 or .13 that compiles nothing. Its cubins name a unit and an architecture, which the fake driver
// checks. It fails if an included header is missing, or if no option names the architecture.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <map>
#include <string>

namespace {

struct Program {
    std::string name, text, log, cubin;
    std::map<std::string, std::string> headers;
};

const std::string INCLUDE = "#include \"";

// The name of an included header that is missing.
std::string missing(const Program& program, const std::string& text) {
    for (size_t at = text.find(INCLUDE); at != std::string::npos; at = text.find(INCLUDE, at + 1)) {
        if (at > 0 && text[at - 1] != '\n') continue;
        size_t start = at + INCLUDE.size();
        std::string name = text.substr(start, text.find('"', start) - start);
        auto found = program.headers.find(name);
        if (name == "emulator.h") continue;
        if (found == program.headers.end()) return name;
        if (found->second.find("#pragma once") == std::string::npos) return name + " (without #pragma once)";
        std::string deeper = missing(program, found->second);
        if (!deeper.empty()) return deeper;
    }
    return "";
}

Program& of(void* program) { return *static_cast<Program*>(program); }

}  // namespace

#define CALL extern "C" __attribute__((visibility("default"))) int

// The name of the library's file gives its version.
CALL nvrtcVersion(int* major, int* minor) {
    Dl_info own = {};
    dladdr(reinterpret_cast<void*>(&nvrtcVersion), &own);
    bool is_older = own.dli_fname && strstr(own.dli_fname, ".so.12") && !getenv("FAKE_NVRTC_IS_LATER");
    return *major = is_older ? 12 : 13, *minor = is_older ? 9 : 0, 0;
}

CALL nvrtcCreateProgram(void** made, const char* text, const char* name, int n, const char* const* headers,
                        const char* const* names) {
    Program* program = new Program{name, text, "", "", {}};
    for (int i = 0; i < n; i++) program->headers[names[i]] = headers[i];
    *made = program;
    return 0;
}

CALL nvrtcCompileProgram(void* it, int n, const char* const* options) {
    Program& program = of(it);
    const std::string target = "--gpu-architecture=";
    for (int i = 0; i < n; i++) {
        if (strncmp(options[i], target.c_str(), target.size()) == 0) {
            program.cubin = "fake cubin of " + program.name + " for " + (options[i] + target.size());
        }
    }
    if (const char* path = getenv("FAKE_CUDA_TRACE")) {
        if (FILE* file = fopen(path, "a")) fprintf(file, "compile %s\n", program.name.c_str()), fclose(file);
    }
    std::string lacks = missing(program, program.text);
    if (!lacks.empty()) program.log = lacks + " is missing";
    if (program.text.empty()) program.log = "an empty unit";
    if (program.cubin.empty()) program.log = "no architecture";
    if (getenv("FAKE_NVRTC_FAILS")) program.log = "FAKE_NVRTC_FAILS is set";
    return program.log.empty() ? 0 : 6;
}

CALL nvrtcGetProgramLogSize(void* it, size_t* n) { return *n = of(it).log.size() + 1, 0; }
CALL nvrtcGetProgramLog(void* it, char* to) { return strcpy(to, of(it).log.c_str()), 0; }
CALL nvrtcGetCUBINSize(void* it, size_t* n) { return *n = of(it).cubin.size() + 1, 0; }
CALL nvrtcGetCUBIN(void* it, char* to) { return memcpy(to, of(it).cubin.c_str(), of(it).cubin.size() + 1), 0; }
CALL nvrtcDestroyProgram(void** it) { return delete static_cast<Program*>(*it), 0; }
